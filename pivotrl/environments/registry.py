"""Environments by name or import path. Imported only when asked for: an external one may need its own packages."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

from pivotrl.environments.base import Environment, Task
from pivotrl.environments.equivalence import EpisodeExecutor, Executor
from pivotrl.errors import UserError

_ENVIRONMENTS = {
    "outfitters": "pivotrl.environments.outfitters:Outfitters",
    "shell_tasks": "pivotrl.environments.shell_tasks:ShellTasks",
    "tau2": "pivotrl.environments.tau2_world:Tau2World",
    "nemo_gym": "pivotrl.environments.gym_server:GymServer",
    "openenv": "pivotrl.environments.openenv:OpenEnv",
}
_MEMBERS = ("name", "version", "tasks", "task", "reset", "expert")


def get_environment(name: str, options: Mapping[str, Any] | None = None) -> Environment:
    """The environment called `name`, or the class at "package.module:Class", built with `options` as keywords.

    Raises UserError for an unknown name, a path that cannot be imported, options that the class does not take, and a
    class that is no environment.
    """
    path = _ENVIRONMENTS.get(name, name)
    module, colon, attribute = path.partition(":")
    if not colon:
        known = ", ".join(sorted(_ENVIRONMENTS))
        raise UserError(f'environment.name: no environment "{name}"; known: {known}, or package.module:Class')
    try:
        factory = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(f"environment.name={name}: cannot be imported: {error}") from error
    environment: Environment = _built(name, factory, dict(options or {}))
    if missing := [member for member in _MEMBERS if not hasattr(environment, member)]:
        raise UserError(
            f"environment.name={name}: no environment, it lacks {', '.join(missing)} (environments/base.py)"
        )
    return environment


def _built(name: str, factory: Callable[..., Any], options: dict[str, Any]) -> Any:
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise UserError(f"environment.options: {name} does not take {sorted(options)} ({error})") from error
    return factory(**options)


# Environments whose states can be executed in, though they make no tasks or episodes here.
_EXECUTORS = {"tau2": ("pivotrl.environments.tau2", "Tau2")}


def get_executor(name: str) -> Executor:
    """What runs two actions from one recorded state: an environment of `get_environment`, or tau2.

    Raises UserError with the known names, and for one whose package is not installed.
    """
    if name in _EXECUTORS:
        module, attribute = _EXECUTORS[name]
        executor: Executor = getattr(import_module(module), attribute)()
        return executor
    if name not in _ENVIRONMENTS and ":" not in name:
        known = ", ".join(sorted({*_ENVIRONMENTS, *_EXECUTORS}))
        raise UserError(f'no environment "{name}" to execute actions in; known: {known}')
    environment: Any = get_environment(name)
    return EpisodeExecutor(environment)


def draw_tasks(
    environment: Environment, split: str, count: int, seed: int, families: Sequence[str] | None = None
) -> list[Task]:
    """`count` tasks of a split (fewer where it has fewer), of the named families only (None: all).

    Raises UserError for an unknown family.
    """
    if families is None:
        return list(environment.tasks(split, count, seed))
    probe = {task.family for task in environment.tasks(split, 256, seed)}
    if unknown := sorted(set(families) - probe) or not families:
        raise UserError(f"environment.families: {environment.name} has {', '.join(sorted(probe))}; not {unknown}")
    wide = count
    while True:  # families come in equal shares, so this ends after a doubling or two
        drawn = environment.tasks(split, wide, seed)
        chosen = [task for task in drawn if task.family in families]
        if len(chosen) >= count or len(drawn) < wide:
            return chosen[:count]
        wide *= 2
