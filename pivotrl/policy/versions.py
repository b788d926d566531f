"""What differs between megatron-core 0.16 and 0.19 in what is used here."""

from __future__ import annotations

from functools import partial
from typing import Any


def submodules(spec: Any) -> Any:
    """Parts of a layer spec's MLP or experts: a ModuleSpec's, or what a builder (0.19) will be called with."""
    return spec.keywords["submodules"] if isinstance(spec, partial) else spec.submodules
