"""One tau2 environment, put into one state after another at the price of what a call touches, not of its database.

retail and airline keep thousands of records (3 and 7 MB; copying them costs a tenth of a second). While a tool that may
write runs, the records it takes in hand are noted: only those can have changed. A state is the records that differ from
the beginning, and what a call did is the records that differ from the state before it.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import pickle
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pivotrl.trajectories.schema import ToolCall

Place = tuple[str, str]  # (field of the database, key of the record; "" for a field that is one piece)
NO_OP = "think"  # of tau-bench; does nothing, and tau2 has no such tool
_USER: Place = ("(user)", "")  # the whole database of the user's side
_LARGE = ("retail", "airline")


class Part(NamedTuple):
    """A record: as text to compare (key order free) and as bytes to restore; None where there is none."""

    text: str | None
    data: bytes | None


@dataclass(frozen=True, eq=False)
class State:
    """What differs from the beginning, and how many ids the tools have drawn."""

    parts: Mapping[Place, Part] = field(default_factory=dict)
    ids: int = 0


class _Ids:
    """Stands for the module `uuid` in the tools: the same state draws the same ids."""

    def __init__(self) -> None:
        self.drawn = 0

    def uuid4(self) -> uuid.UUID:
        self.drawn += 1
        return uuid.UUID(bytes=hashlib.sha256(str(self.drawn).encode()).digest()[:16], version=4)


class _Records(dict[str, Any]):
    """A collection of the database that tells which records were taken in hand."""

    def __init__(self, records: Mapping[str, Any], touch: Callable[[str], None]) -> None:
        super().__init__(records)
        self._touch = touch

    def _touch_all(self) -> None:
        for key in list(self):
            self._touch(key)

    def __getitem__(self, key: str) -> Any:
        self._touch(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._touch(key)
        return super().get(key, default)

    def __setitem__(self, key: str, value: Any) -> None:
        self._touch(key)
        super().__setitem__(key, value)

    def __delitem__(self, key: str) -> None:
        self._touch(key)
        super().__delitem__(key)

    def pop(self, key: str, *default: Any) -> Any:
        self._touch(key)
        return super().pop(key, *default)

    def setdefault(self, key: str, default: Any = None) -> Any:
        self._touch(key)
        return super().setdefault(key, default)

    def update(self, *others: Any, **values: Any) -> None:
        for key, value in dict(*others, **values).items():
            self[key] = value

    def values(self) -> Any:
        self._touch_all()
        return super().values()

    def items(self) -> Any:
        self._touch_all()
        return super().items()

    def clear(self) -> None:
        self._touch_all()
        super().clear()

    def popitem(self) -> Any:
        self._touch_all()
        return super().popitem()


class Domain:
    """A tau2 domain's environment. Not for several threads at once."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.environment: Any = importlib.import_module(f"tau2.domains.{name}.environment").get_environment()
        self._call_type: Any = importlib.import_module("tau2.data_model.message").ToolCall
        self._ids = _Ids()
        tools = importlib.import_module(f"tau2.domains.{name}.tools")
        if hasattr(tools, "uuid"):
            tools.uuid = self._ids  # type: ignore[attr-defined]
        self._origin: dict[Place, Part] = {}  # of every record that was ever touched: as it was in the beginning
        self._touched: set[Place] = set()
        self._noting = False
        self._whole: list[Place] = [] if self.environment.user_tools is None else [_USER]
        database = self.environment.tools.db
        for field_name in type(database).model_fields:
            value = getattr(database, field_name)
            if name in _LARGE and isinstance(value, dict):
                setattr(database, field_name, _Records(value, self._noter(field_name)))
            else:
                self._whole.append((field_name, ""))
        self.initial = State()
        self._loaded = self.initial

    def _noter(self, field_name: str) -> Callable[[str], None]:
        def note(key: str) -> None:
            if self._noting:
                self._touch((field_name, key))

        return note

    def _touch(self, place: Place) -> None:
        if place not in self._touched:
            self._touched.add(place)
            if place not in self._origin:  # never touched, so it is as it was in the beginning
                self._origin[place] = self._part(place)

    def _part(self, place: Place) -> Part:
        """The record as it is now."""
        if place == _USER:
            value = self.environment.user_tools.db
        elif place[1]:
            value = dict.get(getattr(self.environment.tools.db, place[0]), place[1])
        else:
            value = getattr(self.environment.tools.db, place[0])
        if value is None and place[1]:
            return Part(None, None)
        return Part(json.dumps(_plain(value), sort_keys=True, default=str), pickle.dumps(value))

    def _put(self, place: Place, part: Part) -> None:
        if place == _USER:
            self.environment.user_tools.db = pickle.loads(part.data or b"")
        elif not place[1]:
            setattr(self.environment.tools.db, place[0], pickle.loads(part.data or b""))
        elif part.data is None:
            dict.pop(getattr(self.environment.tools.db, place[0]), place[1], None)
        else:
            dict.__setitem__(getattr(self.environment.tools.db, place[0]), place[1], pickle.loads(part.data))

    def _at(self, state: State, place: Place) -> Part:
        return state.parts.get(place) or self._origin[place]

    def load(self, state: State) -> None:
        """Put the environment into `state`."""
        for place in {*self._loaded.parts, *state.parts, *self._touched}:
            wanted = self._at(state, place)
            if place in self._touched or self._at(self._loaded, place) is not wanted:
                self._put(place, wanted)
        self._touched.clear()
        self._ids.drawn = state.ids
        self._loaded = state

    def _changes(self, state: State) -> dict[Place, Part]:
        """What differs from `state`, from which the environment has come."""
        found = ((place, self._part(place)) for place in self._touched)
        return {place: part for place, part in found if part.text != self._at(state, place).text}

    def start(self, begin: Callable[[Any], None]) -> State:
        """The state after `begin`, which is given the environment; for domains whose databases are small."""
        self.load(self.initial)
        for place in self._whole:
            self._touch(place)
        begin(self.environment)
        return State(self._changes(self.initial), self._ids.drawn)

    def after(self, state: State, call: ToolCall) -> tuple[State, bool]:
        """The state after a call, and whether the call failed."""
        self.load(state)
        failed, _, wrote = self._run(call)
        changes = self._changes(state) if wrote else {}
        return (State({**state.parts, **changes}, self._ids.drawn) if changes else state), failed

    def run(self, state: State, calls: Iterable[ToolCall]) -> tuple[list[tuple[str, bool, str]], str]:
        """(name, failed, result) of each call, one after another from `state`; and a digest of what they changed."""
        self.load(state)
        results = []
        for call in calls:
            failed, result, _ = self._run(call)
            results.append((call.name, failed, result))
        changed = sorted((place, part.text) for place, part in self._changes(state).items())
        return results, hashlib.sha256(json.dumps(changed).encode()).hexdigest() if changed else ""

    def respond(self, state: State, call: ToolCall, requestor: str) -> tuple[State, str, bool]:
        """The state after a call by "assistant" or "user", its result, and whether it failed. Total."""
        self.load(state)
        failed, result, wrote = self._run(call, requestor)
        changes = self._changes(state) if wrote else {}
        return (State({**state.parts, **changes}, self._ids.drawn) if changes else state), result, failed

    def hashes(self, state: State) -> str:
        """tau2's own hashes of the databases of agent and user."""
        self.load(state)
        return f"{self.environment.get_db_hash()}/{self.environment.get_user_db_hash()}"

    def holds(self, state: State, assertion: Any) -> bool:
        """Whether one of tau2's assertions about the world is met."""
        self.load(state)
        for place in self._whole:  # an assertion may bring agent and user into step
            self._touch(place)
        return bool(self.environment.run_env_assertion(assertion, raise_assertion_error=False))

    def _run(self, call: ToolCall, requestor: str = "assistant") -> tuple[bool, str, bool]:
        """(failed, result, whether the tool may write). Total."""
        tools = self.environment.tools
        known = tools.has_tool(call.name)
        if call.name == NO_OP and not known:
            well = set(call.arguments) == {"thought"} and isinstance(call.arguments["thought"], str)
            return not well, "(no effect)", False
        if call.name == "calculate" and "**" in str(call.arguments.get("expression")):
            return True, "powers are not evaluated", False  # 9**9**9 would never end
        wrote = requestor == "user" or (known and tools.tool_type(call.name).value == "write")
        if wrote:
            for place in self._whole:
                self._touch(place)
        self._noting = wrote
        try:
            request = self._call_type(id="call", name=call.name, arguments=call.arguments, requestor=requestor)
            response = self.environment.get_response(request)
        except Exception as error:  # arguments or results that its messages cannot hold
            return True, f"{type(error).__name__}: {error}", wrote
        finally:
            self._noting = False
        return bool(response.error), str(response.content), wrote


def _plain(value: Any) -> Any:
    """Models as JSON values."""
    if hasattr(value, "model_dump"):
        return value.model_dump(warnings=False)
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value
