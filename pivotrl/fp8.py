"""FP8 through Transformer Engine: recipes, what they need of machine, sizes and token counts. Pure arithmetic.

Only the linear layers of attention and MLPs (experts too) run in FP8. Embedding, head, routers, norms and the attention
itself stay in bf16 or float32: they are not Transformer Engine's linear layers here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pivotrl.config import Parallel, Precision
from pivotrl.models.dims import Dims


@dataclass(frozen=True)
class Recipe:
    """One of Transformer Engine's, as megatron-core names it."""

    format: str  # megatron-core's `fp8`: "hybrid" (e4m3, gradients e5m2) or "e4m3"
    version: tuple[int, int]  # of Transformer Engine that has it
    capability: tuple[int, int]  # of the GPU, at least
    below: tuple[int, int] | None  # of the GPU, less than
    cuda: tuple[int, int]  # at least
    multiple: int  # rows and columns of a product are multiples of it
    scales: str


RECIPES = {
    "delayed": Recipe("hybrid", (1, 11), (8, 9), None, (12, 1), 16, "per tensor, from the history of maxima"),
    "tensorwise": Recipe("hybrid", (2, 2), (8, 9), None, (12, 1), 16, "per tensor, of the present values"),
    "blockwise": Recipe("e4m3", (2, 3), (9, 0), None, (12, 9), 16, "per 1 x 128 values, weights per 128 x 128"),
    "mxfp8": Recipe("e4m3", (2, 1), (10, 0), (12, 0), (12, 8), 32, "per 32 values, powers of two"),
}
AMAX_HISTORY = 1024  # steps whose maxima the delayed recipe looks back on


@dataclass(frozen=True)
class Machine:
    """What FP8 depends on. None: not there."""

    capability: tuple[int, int] | None  # of the GPU
    engine: tuple[int, int] | None  # version of Transformer Engine
    cuda: tuple[int, int] | None


def machine_problem(recipe: str, machine: Machine) -> str | None:
    """Why this machine cannot run the recipe, and what to do; None if it can."""
    r, key = RECIPES[recipe], f"precision.fp8={recipe}"
    if machine.capability is None:
        return f"{key} needs an NVIDIA GPU; this machine has none (use fp8=null)"
    if machine.engine is None:
        return f"{key} needs Transformer Engine {_dotted(r.version)} or newer: pip install 'pivotrl[gpu]', or fp8=null"
    if machine.engine < r.version:
        return f"{key} needs Transformer Engine {_dotted(r.version)}, {_dotted(machine.engine)} is installed: update it"
    have = _dotted(machine.capability)
    if machine.capability < r.capability or (r.below and machine.capability >= r.below):
        fits = [n for n, o in RECIPES.items() if o.capability <= machine.capability and not _beyond(o, machine)]
        wants = f"{_dotted(r.capability)} or newer" + (f", below {_dotted(r.below)}" if r.below else "")
        can = ", ".join(fits) or "none"
        return f"{key} needs a GPU of compute capability {wants}; this one has {have} (it can: {can})"
    if machine.cuda is not None and machine.cuda < r.cuda:
        return f"{key} needs CUDA {_dotted(r.cuda)}, torch was built for {_dotted(machine.cuda)}: install a newer build"
    return None


def _beyond(recipe: Recipe, machine: Machine) -> bool:
    return recipe.below is not None and machine.capability is not None and machine.capability >= recipe.below


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def size_problems(recipe: str, dims: Dims, parallel: Parallel) -> Iterator[str]:
    """Sides of the products on one rank that are no multiple of what the recipe needs."""
    multiple, tp = RECIPES[recipe].multiple, parallel.tensor
    sides = {
        "hidden size": dims.hidden,
        "query, key and value rows / parallel.tensor": (dims.heads + 2 * dims.kv_heads) * dims.head_dim // tp,
        "head rows / parallel.tensor": dims.heads * dims.head_dim // tp,
    }
    kinds = set(dims.kinds) or {"dense"}
    if "dense" in kinds:
        sides["MLP width / parallel.tensor"] = dims.ffn // tp
    if "moe" in kinds:
        sides["expert width / parallel.expert_tensor"] = dims.moe_ffn // parallel.expert_tensor
    if "mamba" in kinds:
        sides["Mamba projection's rows / parallel.tensor"] = dims.size("mamba_in") // tp
        sides["Mamba width / parallel.tensor"] = dims.size("inner") // tp
    for what, size in sides.items():
        if size % multiple:
            yield f"precision.fp8={recipe} needs multiples of {multiple}; {what} is {size} (use fp8=null)"


def row_multiple(parallel: Parallel, fp8: str | None) -> int:
    """Rows of a tree are padded to a multiple of this.

    Sequence parallelism splits rows over `tensor` ranks; context parallelism deals them in pieces of 16 at least; FP8
    products need multiples on each rank (experts get theirs, padded with zeros, from Transformer Engine).
    """
    each = RECIPES[fp8].multiple if fp8 else 1
    own = each * (parallel.tensor if parallel.sequence else 1)  # of a context-parallel rank
    return own if parallel.context == 1 else parallel.context * math.lcm(own, 16)


def settings(precision: Precision) -> dict[str, Any]:
    """TransformerConfig's FP8 settings."""
    if precision.fp8 is None:
        return {}
    first, last = precision.fp8_first_layers_bf16, precision.fp8_last_layers_bf16
    found: dict[str, Any] = {"fp8": RECIPES[precision.fp8].format, "fp8_recipe": precision.fp8, "fp8_param": False}
    if precision.fp8 == "delayed":
        found |= {"fp8_amax_history_len": AMAX_HISTORY, "fp8_amax_compute_algo": "max"}
    if first or last:
        found |= {
            "first_last_layers_bf16": True,
            "num_layers_at_start_in_bf16": first,
            "num_layers_at_end_in_bf16": last,
        }
    return found


def conflicts(precision: Precision, layers: int, parallel: Parallel) -> Iterator[str]:
    """Settings that cannot be had together."""
    first, last = precision.fp8_first_layers_bf16, precision.fp8_last_layers_bf16
    if precision.fp8 is None:
        if first or last:
            yield "precision.fp8_first_layers_bf16 and fp8_last_layers_bf16 do nothing with precision.fp8=null"
        return
    if precision.fp8 == "delayed" and (first or last):
        yield (
            "precision.fp8_first_layers_bf16 and fp8_last_layers_bf16 need another recipe than delayed, whose maxima "
            "are reduced once for all layers"
        )
    if layers and max(first, last) > layers // parallel.pipeline:
        yield (
            f"precision.fp8_first_layers_bf16={first}, fp8_last_layers_bf16={last}: megatron-core keeps at most the "
            f"{layers // parallel.pipeline} layers of one pipeline stage in bf16"
        )
