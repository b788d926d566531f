"""The model families that the policy, refit and conversion know."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pivotrl.errors import UserError
from pivotrl.models import families
from pivotrl.models.dims import Dims, HFConfig
from pivotrl.models.mapping import Rule


@dataclass(frozen=True)
class Family:
    """A model family: which Hugging Face architectures it serves, and how they map to megatron-core."""

    name: str
    architectures: tuple[str, ...]
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...]
    dims: Callable[[HFConfig], Dims]
    to_megatron_kwargs: Callable[[HFConfig], dict[str, Any]]

    def ignored_names(self, dims: Dims) -> tuple[str, ...]:
        """Patterns of names that a source may have and that carry nothing (a tied head written out)."""
        return (*self.ignored, r"lm_head\.weight") if dims.tied else self.ignored


def discover() -> tuple[Family, ...]:
    """Every family of pivotrl/models/families: each file there is one."""
    found = []
    for info in pkgutil.iter_modules(families.__path__):
        m = importlib.import_module(f"{families.__name__}.{info.name}")
        found.append(Family(info.name, m.ARCHITECTURES, m.RULES, m.IGNORED, m.dims, m.to_megatron_kwargs))
    return tuple(found)


FAMILIES = discover()


def family_for(config: HFConfig) -> Family:
    """The family of a Hugging Face config (its `architectures`). Raises UserError listing the known ones."""
    named = tuple(config.get("architectures") or ())
    for family in FAMILIES:
        if any(a in family.architectures for a in named):
            return family
    known = ", ".join(a for f in FAMILIES for a in f.architectures)
    raise UserError(f"config.json: architectures {list(named)} are not supported; known: {known}")
