"""Environments by name. Imported only when asked for: an external one may need its own packages."""

from __future__ import annotations

from importlib import import_module

from pivotrl.environments.base import Environment
from pivotrl.errors import UserError

_ENVIRONMENTS = {"outfitters": ("pivotrl.environments.outfitters", "Outfitters")}


def get_environment(name: str) -> Environment:
    """The environment called `name`. Raises UserError with the known names."""
    if name not in _ENVIRONMENTS:
        raise UserError(f'environment.name: no environment "{name}"; known: {", ".join(sorted(_ENVIRONMENTS))}')
    module, attribute = _ENVIRONMENTS[name]
    environment: Environment = getattr(import_module(module), attribute)()
    return environment
