"""How the parameters that vLLM serves are made of Hugging Face tensors, and which part of each a rank serves."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pivotrl.generation.engine import RefitError
from pivotrl.models.mapping import plan
from pivotrl.models.registry import family_for
from pivotrl.refit.execute import Shard
from pivotrl.refit.layout import Box, EngineLayout, numel

if TYPE_CHECKING:
    from torch import Tensor, nn


class Served(NamedTuple):
    """One parameter of the engine's model."""

    name: str  # vLLM's
    module: Any
    parameter: str
    tensor: Tensor  # empty where a CPU build keeps a packed copy instead
    sources: list[str]  # Hugging Face names, in the order in which their rows are laid out


def served_parameters(model: nn.Module) -> Iterator[Served]:
    """Every parameter of vLLM's module. A tied head appears under its own name."""
    fused: dict[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    for module_name, module in model.named_modules():
        for parameter, tensor in module.named_parameters(recurse=False):
            sources = _sources(module_name, module, parameter, tensor.shape[0] if tensor.ndim else 0, fused)
            if mapper is not None:
                sources = [_renamed(source, mapper) for source in sources]
            yield Served(f"{module_name}.{parameter}", module, parameter, tensor, sources)


def _renamed(name: str, mapper: Any) -> str:
    """The Hugging Face name that a model's `hf_to_vllm_mapper` makes `name` of."""
    for theirs, ours in mapper.orig_to_new_prefix.items():
        if ours is not None and name.startswith(f"{ours}."):
            name = theirs + name.removeprefix(ours)
            break
    back = {ours: theirs for theirs, ours in mapper.orig_to_new_substr.items() if ours}
    return ".".join(back.get(part, part) for part in name.split("."))


def _sources(name: str, module: nn.Module, parameter: str, rows: int, fused: dict[str, list[str]]) -> list[str]:
    prefix, _, last = name.rpartition(".")
    group, _, kind = parameter.partition("_")
    if group in ("w13", "w2") and kind.startswith("weight"):
        layer = name[: name.index(".experts") + len(".experts")]
        parts = ("gate_proj", "up_proj") if group == "w13" else ("down_proj",)
        return [f"{layer}.{e}.{part}.{kind}" for e in _experts(module, rows) for part in parts]
    if last in fused:
        return [f"{prefix + '.' if prefix else ''}{part}.{parameter}" for part in fused[last]]
    return [f"{name}.{parameter}"]


def _experts(module: nn.Module, rows: int) -> list[int]:
    """The model's numbers of the experts that a module serves, in its order: some of them, if they are spread."""
    placed: Tensor | None = getattr(module, "_expert_map", None)  # [experts of the model] place here, or -1
    if placed is None:
        return list(range(rows))
    here = {place: expert for expert, place in enumerate(placed.tolist()) if place >= 0}
    return [here[place] for place in range(len(here))]


def ignored_biases(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Biases among a checkpoint's tensor `names` that no parameter serves: vLLM's loaders pass over such in silence."""
    served = {source for parameter in served_parameters(model) for source in parameter.sources}
    return sorted(name for name in names if name.endswith(".bias") and name not in served)


class RankShards:
    """The part of each Hugging Face tensor that one tensor-parallel rank serves; all of it on a single rank.

    `elsewhere`: names of which it serves nothing: other ranks' experts, and a vocabulary that ends before its rows.
    `cut_by_engine`: names that it is sent whole and serves a part of.
    """

    def __init__(self, folder: Path, tensor_parallel: int, rank: int, expert_parallel: bool = False) -> None:
        self.layout = EngineLayout(1, tensor_parallel, tensor_parallel if expert_parallel else 1)
        self.elsewhere: frozenset[str] = frozenset()
        self.cut_by_engine: set[str] = set()
        self._boxes: dict[str, Box | None] = {}
        if tensor_parallel > 1:
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
            family = family_for(config)
            dims = family.dims(config)
            for entry in plan(family.rules, dims).values():
                self._boxes.update(zip(entry.hf, self.layout.needs(entry, dims, rank), strict=True))
                self.cut_by_engine.update(entry.hf if entry.rule.layout == "sections" else ())
            self.elsewhere = frozenset(name for name, box in self._boxes.items() if box is None or not numel(box))

    @property
    def boxes(self) -> dict[str, Box | None]:
        return self._boxes

    def box(self, name: str) -> Box | None:
        """Where this rank's part lies in the whole; None: the part is the whole."""
        return self._boxes.get(name)

    def part(self, name: str, sent: Tensor | Shard) -> Tensor:
        """This rank's part of a whole tensor, or a shard's content if it is this rank's. Raises RefitError if not."""
        box = self._boxes.get(name)
        if isinstance(sent, Shard):
            if sent.box != box:
                raise RefitError(f"refit: weight {name!r} came as the part {sent.box}; this rank serves {box}")
            return sent.tensor
        if box is None:
            return sent
        return sent[tuple(slice(start, stop) for start, stop in box)]


def content(sent: Tensor | Shard) -> Tensor:
    return sent.tensor if isinstance(sent, Shard) else sent


def full_shape(sent: Any) -> tuple[int, ...]:
    return sent.full_shape if isinstance(sent, Shard) else tuple(sent.shape)
