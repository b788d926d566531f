"""A resources server of NeMo-Gym as an environment (`environment.name=nemo_gym`): its tools and its reward, over HTTP.

Tasks are the rows that the server comes with (`responses_create_params` and whatever else it verifies by). An episode
is a session of the server, kept by its cookies: /seed_session, a POST to /<tool> for each call, /verify at the first
plain message or the last turn. It has no user, no expert and no state to hash.
"""

from __future__ import annotations

import hashlib
import json
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException
from http.cookiejar import CookieJar
from typing import Any

from pivotrl.environments.base import Outcome, Task
from pivotrl.environments.procedural import TurnEpisode
from pivotrl.environments.row_tasks import RowTasks
from pivotrl.trajectories.formats.responses import state_of
from pivotrl.trajectories.gym_rows import items_of
from pivotrl.trajectories.normalise import RowError
from pivotrl.trajectories.schema import JsonDict, ToolCall
from pivotrl.verifiers.options import read_settings

_DEFAULTS: dict[str, Any] = {
    "url": "",  # http://host:port of the resources server
    "train": None,  # JSONL files of its tasks
    "test": None,
    "success_reward": 1.0,  # an episode succeeds from this reward on
    "timeout_seconds": 120.0,  # of one request
}


class GymServer(RowTasks):
    """Tasks and episodes of one server. See base.Environment."""

    name = "nemo_gym"

    def __init__(self, **options: Any) -> None:
        self.options = read_settings("environment.options of nemo_gym", options, _DEFAULTS)
        super().__init__(self.name, self.options, _problem)

    def reset(self, task: Task, max_turns: int) -> GymEpisode:
        return GymEpisode(task, max_turns, self.options)


class GymEpisode(TurnEpisode):
    """One session. What the server cannot answer raises: an error of the environment, never the policy's failure."""

    def __init__(self, task: Task, max_turns: int, options: JsonDict) -> None:
        messages, tools = state_of(task.spec["responses_create_params"])
        super().__init__(task, max_turns, tools, messages)
        self._given = len(messages)
        self._url, self._timeout = str(options["url"]).rstrip("/"), float(options["timeout_seconds"])
        self._success = float(options["success_reward"])
        self._opener = urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))
        self._tools = {tool["function"]["name"] for tool in tools}
        self._outcome: Outcome | None = None
        self._post("seed_session", task.spec)

    def answer(self, text: str) -> str | None:
        return None  # a plain message is the answer

    def run(self, call: ToolCall) -> str:
        if call.name not in self._tools:  # its address could be that of /verify
            return json.dumps({"error": f"there is no tool {call.name}"})
        return self._post(urllib.parse.quote(call.name, safe=""), call.arguments, refusals=True)

    def outcome(self) -> Outcome:
        """By the server's reward. Raises where it says that it could not judge (`mask_sample`)."""
        if self._outcome is None:
            self._outcome = self._verified()
        return self._outcome

    def _verified(self) -> Outcome:
        items = [item for i, m in enumerate(self.messages[self._given :], self._given) for item in items_of(m, i)]
        response = {
            "id": f"resp_{self.task.id}",
            "created_at": 0.0,
            "model": "policy",
            "object": "response",
            "output": items,
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": [],
        }
        answer = json.loads(self._post("verify", {**self.task.spec, "response": response}))
        reward = answer.get("reward") if isinstance(answer, dict) else None
        if isinstance(reward, bool) or not isinstance(reward, (int, float)) or answer.get("mask_sample"):
            why = answer.get("failure_reason") if isinstance(answer, dict) else answer
            raise RuntimeError(f"{self._url}/verify could not judge {self.task.id}: reward {reward!r}, {why}")
        ended = "too_many_turns" if self.messages[-1]["role"] != "assistant" else "low_reward"
        success = reward >= self._success
        return Outcome(success, "ok" if success else ended, {"reward": float(reward)})

    def state_hash(self) -> str:
        return hashlib.sha256(json.dumps(self.messages, sort_keys=True).encode()).hexdigest()

    def _post(self, path: str, body: Any, refusals: bool = False) -> str:
        """The text of the answer; with `refusals`, that of an error status as well (a wrong call is the policy's)."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self._url}/{path}", json.dumps(body).encode(), headers)
        try:
            with self._opener.open(request, timeout=self._timeout) as response:
                return str(response.read().decode("utf-8", "replace"))
        except urllib.error.HTTPError as error:
            said = error.read().decode("utf-8", "replace")
            if refusals and error.code < 500:
                return said
            raise RuntimeError(f"{self._url}/{path} answered {error.code}: {said[:300]}") from error
        except (OSError, HTTPException) as error:
            raise RuntimeError(f"{self._url}/{path}: no answer ({error})") from error


def _problem(row: JsonDict) -> str | None:
    try:
        state_of(row["responses_create_params"])
    except (KeyError, TypeError, AttributeError):
        return "no readable responses_create_params; is it a NeMo-Gym task?"
    except RowError as error:
        return f"responses_create_params: {error}"
    return None
