"""A server of OpenEnv as an environment (`environment.name=openenv`): its MCP tools and its reward, over a WebSocket.

A task is a row: `reset`, the keywords of the server's reset, and `messages` before the first turn. An episode is a
connection: reset, the tools it lists, a step for each call. It has no user, no expert and no state to hash.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from contextlib import suppress
from typing import Any

from pivotrl.environments.base import Outcome, Task
from pivotrl.environments.procedural import TurnEpisode
from pivotrl.environments.row_tasks import RowTasks
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import JsonDict, ToolCall
from pivotrl.verifiers.options import one_of, read_settings

_DEFAULTS: dict[str, Any] = {
    "url": "",  # http://host:port of the server
    "train": None,  # JSONL files of tasks
    "test": None,
    "prompt_field": "",  # what reset's observation asks, e.g. metadata.question: a user message after the row's own
    "answer_tool": "",  # the tool of one argument that a plain message goes to; without it a plain message just ends
    "reward": "last",  # or sum: what the rewards of an episode's steps come to
    "success_reward": 1.0,  # an episode succeeds from this reward on
    "timeout_seconds": 120.0,  # of one message
}
# What a tool answers to a wrong call is the policy's to read; of the rest of the server's errors it can know nothing.
_OF_THE_POLICY = ("execution_error", "invalid_args", "tool_not_found")
_MOST_BYTES = 100 * 2**20  # of one message, as OpenEnv's own client


class OpenEnv(RowTasks):
    """Tasks and episodes of one server. See base.Environment."""

    name = "openenv"

    def __init__(self, **options: Any) -> None:
        where = "environment.options of openenv"
        self.options = read_settings(where, options, _DEFAULTS)
        one_of("openenv", "reward", self.options["reward"], ("last", "sum"))
        super().__init__(self.name, self.options, self._problem)

    def _problem(self, row: JsonDict) -> str | None:
        messages, reset = row.get("messages", []), row.get("reset", {})
        if not isinstance(reset, dict):
            return "reset is no object: the keywords of the server's reset"
        if not isinstance(messages, list) or not all(_plain(m) for m in messages):
            return 'messages is no list of {"role": "system" or "user", "content": text}'
        if not self.options["prompt_field"] and (not messages or messages[-1]["role"] != "user"):
            return "messages do not end with the user's; give it, or environment.options.prompt_field"
        return None

    def reset(self, task: Task, max_turns: int) -> OpenEnvEpisode:
        return OpenEnvEpisode(task, max_turns, self.options)


class OpenEnvEpisode(TurnEpisode):
    """One connection. What the server cannot do raises: an error of the environment, never the policy's failure."""

    def __init__(self, task: Task, max_turns: int, options: JsonDict) -> None:
        self._options = options
        self._server = _Server(str(options["url"]), float(options["timeout_seconds"]))
        self._closed = weakref.finalize(self, self._server.close)
        first = self._server.ask("reset", task.spec.get("reset", {}))
        messages = [dict(message) for message in task.spec.get("messages", [])]
        if field := str(options["prompt_field"]):
            messages.append({"role": "user", "content": _at(first, field)})
        listed = self._server.ask("step", {"type": "list_tools"}).get("tools") or []
        super().__init__(task, max_turns, [_function(tool) for tool in listed], messages)
        self._answer_argument = self._argument_of(str(options["answer_tool"]))
        self._server.rewards.clear()  # nothing has been done yet

    def answer(self, text: str) -> str | None:
        if self._answer_argument:
            self._call(str(self._options["answer_tool"]), {self._answer_argument: text})
        return None

    def run(self, call: ToolCall) -> str:
        if self._server.over:
            return json.dumps({"error": "the episode is over"})
        return self._call(call.name, call.arguments)

    def step(self, action: Any) -> None:
        super().step(action)
        self.done = self.done or self._server.over
        if self.done:
            self._closed()

    def outcome(self) -> Outcome:
        """By the rewards of the steps. Raises where the server ended the episode without one."""
        rewards, over = self._server.rewards, self._server.over
        if over and not rewards:
            raise RuntimeError(f"{self._server.url}: {self.task.id} is over, and has no reward")
        reward = sum(rewards) if self._options["reward"] == "sum" else [0.0, *rewards][-1]
        if reward >= float(self._options["success_reward"]):
            return Outcome(True, "ok", {"reward": reward})
        late = not over and self.messages[-1]["role"] != "assistant"
        return Outcome(False, "too_many_turns" if late else "low_reward", {"reward": reward})

    def state_hash(self) -> str:
        return hashlib.sha256(json.dumps(self.messages, sort_keys=True).encode()).hexdigest()

    def _argument_of(self, tool: str) -> str:
        if not tool:
            return ""
        found = [t["function"]["parameters"] for t in self.tools if t["function"]["name"] == tool]
        names = list(found[0].get("required") or found[0].get("properties") or {}) if found else []
        if len(names) != 1:
            raise RuntimeError(f"environment.options.answer_tool: the server has no tool {tool!r} of one argument")
        return str(names[0])

    def _call(self, name: str, arguments: Any) -> str:
        sent = {"type": "call_tool", "tool_name": name, "arguments": arguments}
        observation = self._server.ask("step", sent)
        if error := observation.get("error"):
            if error.get("error_type") not in _OF_THE_POLICY:
                raise RuntimeError(f"{self._server.url}: {name}: {error}")
            return json.dumps({"error": error.get("message")})
        return _text(observation.get("result"))


class _Server:
    """A connection, what its steps have been rewarded with, and whether the episode is over."""

    def __init__(self, url: str, timeout: float) -> None:
        try:
            from websockets.exceptions import ConnectionClosed, WebSocketException
            from websockets.sync.client import connect
        except ImportError as error:
            raise UserError(
                "environment.name=openenv needs the package websockets: pip install 'pivotrl[openenv]'"
            ) from error
        self.url, self._timeout = url, timeout
        self.rewards: list[float] = []
        self.over = False
        self._closed, self._broken = ConnectionClosed, (WebSocketException, OSError, ValueError)
        address = "ws" + url.rstrip("/").removeprefix("http") + "/ws"
        try:
            self._socket = connect(address, open_timeout=timeout, close_timeout=2, max_size=_MOST_BYTES)
        except self._broken as error:
            raise RuntimeError(f"{url}: no connection ({type(error).__name__}: {error})") from error

    def close(self) -> None:
        self._socket.close()

    def ask(self, kind: str, data: JsonDict) -> JsonDict:
        """The observation that answers. Raises RuntimeError where there is none."""
        try:
            with suppress(self._closed):  # a server that is full says so, then closes: what it said is still to be read
                self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(self._socket.recv(timeout=self._timeout))
        except self._broken as error:
            raise RuntimeError(f"{self.url}: no answer to {kind} ({type(error).__name__}: {error})") from error
        found = answer.get("data") or {}
        if answer.get("type") != "observation" or not isinstance(found.get("observation"), dict):
            raise RuntimeError(f"{self.url}: {kind} {data}: {found.get('message', answer)}{_hint(found)}")
        if found.get("reward") is not None:
            self.rewards.append(float(found["reward"]))
        self.over = self.over or bool(found.get("done"))
        return dict(found["observation"])


def _hint(error: JsonDict) -> str:
    full = error.get("code") == "CAPACITY_REACHED"
    return "; raise the server's max_concurrent_envs to the episodes that are played together" if full else ""


def _plain(message: Any) -> bool:
    wanted = isinstance(message, dict) and message.get("role") in ("system", "user")
    return wanted and isinstance(message.get("content"), str)


def _at(observation: JsonDict, field: str) -> str:
    """The text at a dotted path. Raises RuntimeError where there is none."""
    found: Any = observation
    for key in field.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, str):
        raise RuntimeError(f"environment.options.prompt_field={field}: reset's observation has no such text")
    return found


def _function(tool: JsonDict) -> JsonDict:
    parameters = tool.get("input_schema", tool.get("inputSchema", {}))
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": parameters}
    return {"type": "function", "function": function}


def _text(result: Any) -> str:
    """The text of an MCP result; anything else as JSON."""
    parts = result.get("content") if isinstance(result, dict) else None
    if isinstance(parts, list) and all(isinstance(p, dict) and p.get("type") == "text" for p in parts):
        return "\n".join(str(part["text"]) for part in parts)
    return result if isinstance(result, str) else json.dumps(result)
