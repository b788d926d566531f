"""tau2-bench as an environment (`environment.name=tau2`): its tasks, databases, tools and scoring, in this process.

One domain at a time (`environment.options.domain`). The user is a model behind an OpenAI-compatible endpoint, as in the
benchmark, or the task's scenario as it is written (tau2_user). Success is tau2's: the product of the parts that a
task's reward basis names. The expert replays a task's ground-truth actions.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

from pivotrl.environments.base import NoExpert, Outcome, Task
from pivotrl.environments.procedural import TurnEpisode, demonstration
from pivotrl.environments.tau2 import DOMAINS, beginning, installed
from pivotrl.environments.tau2_state import Domain, State
from pivotrl.environments.tau2_user import STOPS, ModelUser, ScenarioUser, User, open_client, user_settings
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall, Trajectory
from pivotrl.verifiers.options import read_settings

GREETING = "Hi! How can I help you today?"  # how the benchmark begins every dialogue
_DEFAULTS: dict[str, Any] = {
    "domain": "retail",
    "user": None,  # the scenario as it is written, or {base_url, model, ...}: tau2_user
    "max_errors": 10,  # failed calls of an episode, as in the benchmark
}


class Tau2World:
    """Tasks, episodes and demonstrations of one tau2 domain. See base.Environment."""

    name = "tau2"
    waits = True  # a step asks a model: episodes take theirs in threads

    def __init__(self, **options: Any) -> None:
        self.options = read_settings("environment.options of tau2", options, _DEFAULTS)
        self.domain = str(self.options["domain"])
        if self.domain not in DOMAINS:
            raise UserError(f"environment.options.domain is {self.domain!r}; tau2 has {', '.join(DOMAINS)}")
        settings = user_settings(self.options["user"])
        if settings is None and self.domain == "telecom":
            raise UserError(
                "environment.options.user: the user of tau2's telecom acts on a telephone, which its scenario alone "
                "cannot; give a model: {base_url: http://host:8000/v1, model: NAME}"
            )
        self.version = f"{installed()}, {self.domain}, user {settings['model'] if settings else 'scenario'}"
        self._settings, self._client = settings, open_client(settings) if settings else None
        self._world = World(self.domain)

    def tasks(self, split: str, count: int, seed: int = 0) -> list[Task]:
        """At most `count` tasks of tau2's own split, in an order drawn by `seed`; there are some dozens."""
        splits = _splits(self.domain)
        if split not in splits:
            raise UserError(f"environment tau2: {self.domain} has no split {split!r}; it has {', '.join(splits)}")
        ids = sorted(splits[split])
        Random(f"tau2/{self.domain}/{split}/{seed}").shuffle(ids)
        return [self.task(f"tau2-{self.domain}-{id}") for id in ids[:count]]

    def task(self, task_id: str) -> Task:
        """The task `tau2-<domain>-<id>`. Raises UserError for an unknown one."""
        prefix = f"tau2-{self.domain}-"
        if task_id.removeprefix(prefix) not in _tasks(self.domain) or not task_id.startswith(prefix):
            raise UserError(f'"{task_id}" is no task of tau2 {self.domain} (they read {prefix}0)')
        return Task(task_id, self.domain, {"id": task_id.removeprefix(prefix)})

    def reset(self, task: Task, max_turns: int) -> Tau2Episode:
        found = _tasks(self.domain)[task.spec["id"]]
        episode = Tau2Episode(task, found, self._world, max_turns, int(self.options["max_errors"]))
        user: User = ScenarioUser(_told(found))
        if self._client is not None:
            assert self._settings is not None
            tools = self._world.user_tools
            system = _user_prompt(str(found.user_scenario), bool(tools))
            user = ModelUser(self._client, self._settings, system, tools, lambda call: episode.call(call, "user")[0])
        episode.begin(user)
        return episode

    def expert(self, task: Task, run: int = 0) -> Trajectory:
        """The ground-truth actions, then one message that tells what has to be told. Raises NoExpert where that is not
        a success: actions of the user, no action at all, parts that need a judge."""
        found = _tasks(self.domain)[task.spec["id"]]
        criteria = found.evaluation_criteria
        actions = (criteria.actions if criteria else None) or []
        if not actions or any(action.requestor == "user" for action in actions):
            raise NoExpert(f"tau2 {task.id}: no ground-truth actions that an agent alone could take")
        episode = Tau2Episode(task, found, self._world, len(actions) + 1, len(actions) + 1)
        episode.begin(ScenarioUser(_told(found)))
        for action in actions:
            episode.step(Action(tool_calls=(ToolCall(action.name, dict(action.arguments)),)))
        info = ", ".join(criteria.communicate_info or [])
        episode.step(Action(text=f"That is done. {info}".strip()))
        outcome = episode.outcome()
        if not outcome.success:
            raise NoExpert(f"tau2 {task.id}: the ground-truth actions end with {outcome.reason}")
        return demonstration(episode, task, run, self.name, "tau2")


class World:
    """The one copy of a domain's databases that all episodes share: each holds what it has changed. Thread-safe."""

    def __init__(self, name: str) -> None:
        self._domain, self._lock = Domain(name), Lock()
        environment = self._domain.environment
        self.tools: list[JsonDict] = [tool.openai_schema for tool in environment.get_tools()]
        has_user = environment.user_tools is not None
        self.user_tools: list[JsonDict] = [t.openai_schema for t in environment.get_user_tools()] if has_user else []
        self.prompt = _agent_prompt(environment.get_policy())
        self._goals: dict[str, str] = {}

    def begin(self, found: Any) -> State:
        if _midway(found):
            raise ValueError(f"tau2 task {found.id} begins in the middle of a dialogue, which is not supported")
        with self._lock:
            return beginning(self._domain, str(found.id))

    def respond(self, state: State, call: ToolCall, requestor: str) -> tuple[State, str, bool]:
        with self._lock:
            return self._domain.respond(state, call, requestor)

    def hashes(self, state: State) -> str:
        with self._lock:
            return self._domain.hashes(state)

    def holds(self, state: State, assertion: Any) -> bool:
        with self._lock:
            return self._domain.holds(state, assertion)

    def goal(self, found: Any) -> str:
        """Hashes of the databases after the ground-truth actions; like tau2, it goes on after one that fails."""
        if found.id not in self._goals:
            state = self.begin(found)
            for action in found.evaluation_criteria.actions or []:
                call = ToolCall(action.name, dict(action.arguments))
                state, _, _ = self.respond(state, call, action.requestor)
            self._goals[found.id] = self.hashes(state)
        return self._goals[found.id]


class Tau2Episode(TurnEpisode):
    """One dialogue. `begin` must be called once, before anything else."""

    def __init__(self, task: Task, found: Any, world: World, max_turns: int, max_errors: int) -> None:
        messages = [{"role": "system", "content": world.prompt}, {"role": "assistant", "content": GREETING}]
        super().__init__(task, max_turns, world.tools, messages)
        self._found, self._world, self._max_errors = found, world, max_errors
        self._state = world.begin(found)
        self._errors = 0
        self._made: list[tuple[str, ToolCall]] = []  # (requestor, call) of agent and user
        self._ended = ""  # which stop word the user said, or why the episode broke off
        self._user: User

    def begin(self, user: User) -> None:
        self._user = user
        self._hear(self._user.reply(GREETING))

    def _hear(self, said: str) -> str | None:
        stop = next((word for word in STOPS if word in said), None)
        if stop is not None:
            self._ended, self.done = stop.strip("#"), True
            return None
        if len(self.messages) == 2:
            self.messages.append({"role": "user", "content": said})
        return said

    def answer(self, text: str) -> str | None:
        return self._hear(self._user.reply(text))

    def run(self, call: ToolCall) -> str:
        content, failed = self.call(call, "assistant")
        self._errors += failed
        if self._errors >= self._max_errors and not self.done:
            self._ended, self.done = "too_many_errors", True
        return content

    def call(self, call: ToolCall, requestor: str) -> tuple[str, bool]:
        """(result, failed) of a tool call by "assistant" or "user". Total."""
        self._made.append((requestor, call))
        self._state, result, failed = self._world.respond(self._state, call, requestor)
        return result, failed

    def state_hash(self) -> str:
        return self._world.hashes(self._state)

    def outcome(self) -> Outcome:
        """tau2's reward: the product of the parts of the task's reward basis; an episode broken off has none."""
        details: JsonDict = {"ended": self._ended or "too_many_turns", "errors": self._errors}
        if self._ended not in [word.strip("#") for word in STOPS]:
            return Outcome(False, details["ended"], details)
        details["parts"] = parts = self._parts()
        failed = [name.lower() for name, met in parts.items() if not met]
        return Outcome(not failed, failed[0] if failed else "ok", details)

    def _parts(self) -> dict[str, bool]:
        criteria = self._found.evaluation_criteria
        if criteria is None:
            return {}
        basis = {str(part.value) for part in criteria.reward_basis}
        if unscored := basis - set(_PARTS):
            raise ValueError(f"tau2 {self.task.id}: {', '.join(unscored)} in its reward basis needs a judge")
        return {name: met(self, criteria) for name, met in _PARTS.items() if name in basis}

    def _db(self, criteria: Any) -> bool:
        if criteria.actions is None and criteria.env_assertions is None:
            return True
        return self.state_hash() == self._world.goal(self._found)

    def _env_assertion(self, criteria: Any) -> bool:
        checks = criteria.env_assertions or []
        return all(self._world.holds(self._state, check) for check in checks)

    def _communicate(self, criteria: Any) -> bool:
        said = [str(m["content"]).lower().replace(",", "") for m in self.messages if _speaks(m)]
        return all(any(info.lower() in text for text in said) for info in criteria.communicate_info or [])

    def _action(self, criteria: Any) -> bool:
        """Every ground-truth action was called by somebody, with the arguments that it is compared by."""
        kind = importlib.import_module("tau2.data_model.message").ToolCall
        made = [kind(id="", name=c.name, arguments=c.arguments, requestor=requestor) for requestor, c in self._made]
        return all(any(map(action.compare_with_tool_call, made)) for action in criteria.actions or [])


_PARTS: dict[str, Callable[[Tau2Episode, Any], bool]] = {  # NL_ASSERTION is not among them
    "DB": Tau2Episode._db,  # first: assertions may touch the world
    "ENV_ASSERTION": Tau2Episode._env_assertion,
    "ACTION": Tau2Episode._action,
    "COMMUNICATE": Tau2Episode._communicate,
}


def _speaks(message: JsonDict) -> bool:
    return message["role"] == "assistant" and isinstance(message.get("content"), str)


@lru_cache(maxsize=len(DOMAINS))
def _tasks(domain: str) -> dict[str, Any]:
    installed()
    module = importlib.import_module(f"tau2.domains.{domain}.environment")
    return {str(task.id): task for task in module.get_tasks(None)}


@lru_cache(maxsize=len(DOMAINS))
def _splits(domain: str) -> dict[str, list[str]]:
    """tau2's own "train" and "test"; mock, which has none, is dealt out in turn."""
    installed()
    found = importlib.import_module(f"tau2.domains.{domain}.environment").get_tasks_split() or {}
    if "train" in found and "test" in found:
        return {split: [str(id) for id in found[split]] for split in ("train", "test")}
    whole = [id for id, task in _tasks(domain).items() if not _midway(task)]
    return {"train": whole[::2], "test": whole[1::2]}


def _midway(found: Any) -> bool:
    return bool(found.initial_state and found.initial_state.message_history)


def _told(found: Any) -> str:
    """The scenario as a user would write it in one message."""
    said = found.user_scenario.instructions
    if isinstance(said, str):
        return said
    parts = (said.reason_for_call, said.known_info, said.unknown_info, said.task_instructions)
    return "\n".join(str(part).strip() for part in parts if part)


def _agent_prompt(policy: str) -> str:
    texts = _constants("tau2.agent.llm_agent", ("AGENT_INSTRUCTION", "SYSTEM_PROMPT"))
    return texts["SYSTEM_PROMPT"].format(agent_instruction=texts["AGENT_INSTRUCTION"], domain_policy=policy)


def _user_prompt(scenario: str, tools: bool) -> str:
    folder = importlib.import_module("tau2.utils").DATA_DIR / "tau2" / "user_simulator"
    guidelines = (folder / f"simulation_guidelines{'_tools' if tools else ''}.md").read_text(encoding="utf-8")
    text = _constants("tau2.user.user_simulator", ("SYSTEM_PROMPT",))["SYSTEM_PROMPT"]
    return text.format(global_user_sim_guidelines=guidelines, instructions=scenario)


@lru_cache(maxsize=4)
def _constants(module: str, names: Sequence[str]) -> dict[str, str]:
    """String constants of a module that is read, not imported: importing it would need tau2's LLM client."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    found = {}
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id in names:
            value = node.value
            if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "strip":
                value = value.func.value
            found[node.targets[0].id] = str(ast.literal_eval(value)).strip()
    if missing := set(names) - set(found):
        raise UserError(f"environment tau2: {installed()} has no {', '.join(missing)} in {module}; use 26.3")
    return found
