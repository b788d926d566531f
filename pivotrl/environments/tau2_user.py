"""Who plays the user of a tau2 task: a model behind any OpenAI-compatible endpoint, or its scenario as it is written.

Both speak as tau2's own simulator does: text to the agent, or (telecom) calls of the user's own tools; a text with one
of `STOPS` ends the dialogue.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from pivotrl.errors import UserError
from pivotrl.trajectories.schema import JsonDict, ToolCall
from pivotrl.verifiers.judge_client import ChatClient, JudgeError
from pivotrl.verifiers.options import read_settings

STOP = "###STOP###"
STOPS = (STOP, "###TRANSFER###", "###OUT-OF-SCOPE###")
_MOST_CALLS = 30  # of the user's tools between two of its texts
_OPTIONS: dict[str, Any] = {
    "base_url": "",  # ".../v1"
    "model": "",
    "api_key_env": None,  # name of the environment variable that holds the key; None: no key is sent
    "temperature": 0.0,
    "max_tokens": 1024,
    "seed": None,
    "timeout_seconds": 120.0,
    "deadline_seconds": 300.0,  # of one answer with its retries
    "retries": 4,
    "backoff_seconds": 0.5,
    "concurrency": 16,
}


class UserUnavailable(RuntimeError):
    """The simulator gave no usable answer: an error of the environment, never a failure of the policy."""


class User(Protocol):
    """One dialogue's user."""

    def reply(self, text: str) -> str:
        """What the user says to the agent's text. Raises UserUnavailable."""
        ...


@dataclass
class ScenarioUser:
    """Says its whole scenario, then ends the dialogue at the agent's next text. Deterministic; no model is needed."""

    scenario: str
    _said: bool = False

    def reply(self, text: str) -> str:
        said, self._said = self._said, True
        return STOP if said else self.scenario


@dataclass
class ModelUser:
    """tau2's user simulator: its guidelines and the scenario as the system prompt, roles exchanged."""

    client: ChatClient
    settings: JsonDict
    system: str
    tools: list[JsonDict]  # the user's own (telecom), as OpenAI functions
    call: Callable[[ToolCall], str]  # carries out one of them
    messages: list[JsonDict] = field(default_factory=list)

    def reply(self, text: str) -> str:
        self.messages.append({"role": "user", "content": text})
        for _ in range(_MOST_CALLS):
            message = self._ask()
            self.messages.append(message)
            if not message.get("tool_calls"):
                return str(message["content"])
            for row in message["tool_calls"]:
                self.messages.append({"role": "tool", "tool_call_id": row["id"], "content": self.call(_parsed(row))})
        raise UserUnavailable(f"the user simulator made {_MOST_CALLS} calls without a word to the agent")

    def _ask(self) -> JsonDict:
        s = self.settings
        body = {
            "model": s["model"],
            "messages": [{"role": "system", "content": self.system}, *self.messages],
            "temperature": s["temperature"],
            "max_tokens": s["max_tokens"],
        }
        if self.tools:
            body["tools"] = self.tools
        if s["seed"] is not None:
            body["seed"] = s["seed"]
        try:
            answer = self.client.ask(body)
        except JudgeError as error:
            raise UserUnavailable(f"user simulator {s['model']} at {s['base_url']}: {error}") from None
        if answer.finish_reason == "length":
            raise UserUnavailable(f"user simulator {s['model']}: its answer was cut at max_tokens={s['max_tokens']}")
        if not answer.text.strip() and not answer.tool_calls:
            raise UserUnavailable(f"user simulator {s['model']}: an empty answer")
        message: JsonDict = {"role": "assistant", "content": answer.text}
        if answer.tool_calls:
            message["tool_calls"] = list(answer.tool_calls)
        return message


def _parsed(row: Any) -> ToolCall:
    try:
        arguments = json.loads(row["function"]["arguments"] or "{}")
        if not isinstance(arguments, dict):
            raise TypeError
        return ToolCall(str(row["function"]["name"]), arguments)
    except (KeyError, TypeError, ValueError) as error:
        raise UserUnavailable(f"the user simulator's tool call cannot be read: {str(row)[:200]}") from error


def user_settings(options: Any) -> JsonDict | None:
    """`environment.options.user`: None for the scenario as written, else the settings of a model.

    Raises UserError for an unknown key, or without `base_url` and `model`.
    """
    if options in (None, "scenario"):
        return None
    where = "environment.options.user"
    if not isinstance(options, dict):
        raise UserError(f'{where} is {options!r}; it is "scenario", or a mapping with base_url and model')
    settings = read_settings(where, options, _OPTIONS)
    if missing := [key for key in ("base_url", "model") if not settings[key]]:
        raise UserError(f"{where}: {' and '.join(missing)} missing; name the endpoint and the model that it serves")
    return settings


def open_client(settings: JsonDict) -> ChatClient:
    """Raises UserError for an address without a scheme and for a key that is not in the environment."""
    names = ("timeout_seconds", "deadline_seconds", "retries", "backoff_seconds", "concurrency")
    try:
        return ChatClient(settings["base_url"], settings["api_key_env"], **{name: settings[name] for name in names})
    except UserError as error:
        raise UserError(f"environment.options.user: {str(error).removeprefix('judge: ')}") from None
