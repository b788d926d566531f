"""A checkpoint on disk as Hugging Face tensors by name: a Hugging Face folder or a Megatron distributed checkpoint."""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from checkpoint_tools import nemo
from checkpoint_tools.dist_format import DistReader
from checkpoint_tools.keys import Slot, variants
from pivotrl.errors import UserError
from pivotrl.models import block_fp8
from pivotrl.models.dims import Dims
from pivotrl.models.extents import Extent, cut
from pivotrl.models.folder import ModelFolder
from pivotrl.models.mapping import Entry, check_source, plan, row_runs, unpack
from pivotrl.models.registry import Family, family_for

HF_FILES = "hf"  # folder beside a converted Megatron checkpoint: config, tokenizer, template
TRACKER = "latest_checkpointed_iteration.txt"
# not model weights: optimiser, generators, and what layers keep beside their weights
_BESIDE = re.compile(r"(^|\.)(optimizer|opt|rng_state|rerun_state_machine|_extra_state)(\.|/|$)|_extra_state")


class Side(Protocol):
    """Hugging Face tensors by name, none of them read before `read`."""

    path: Path

    @property
    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]: ...

    def read(self, name: str) -> Tensor: ...

    def extents(self, name: str) -> list[Extent] | None:
        """Where the bytes of a tensor lie, in order; None where only `read` can put them together."""
        ...


@dataclass(frozen=True)
class Model:
    """What a Hugging Face config says about names and shapes."""

    family: Family
    dims: Dims
    table: dict[str, Entry]

    @classmethod
    def of(cls, folder: ModelFolder) -> Model:
        """Raises UserError for an unknown architecture or a config whose sizes make no sense."""
        file = folder.path / "config.json"
        try:
            family = family_for(folder.config)
            dims = family.dims(folder.config)
        except (TypeError, ValueError, ZeroDivisionError, OverflowError) as error:
            raise UserError(f"{file}: a size is not a whole number ({error}); fetch the file again") from error
        sizes = (dims.layers, dims.hidden, dims.vocab, dims.heads, dims.kv_heads, dims.head_dim, dims.ffn)
        if min(sizes) < 1 or dims.heads % dims.kv_heads or not 0 <= dims.layers * max(1, dims.experts) <= 10**6:
            raise UserError(f"{file}: sizes that no model has: {dims}")
        return cls(family, dims, plan(family.rules, dims))

    @cached_property
    def entry_of(self) -> dict[str, tuple[str, Entry]]:
        """Hugging Face name -> the megatron parameter that it is a part of."""
        return {hf: (name, entry) for name, entry in self.table.items() for hf in entry.hf}


class HFSide:
    """A Hugging Face folder. Weights in FP8 blocks are read as what they stand for, in the dtype of config.json."""

    def __init__(self, path: Path) -> None:
        self.path, self.folder = path, ModelFolder(path)

    @cached_property
    def block(self) -> tuple[int, int] | None:
        """Block size of FP8 weights, None where there are none."""
        return block_fp8.block_size(self.folder.config, str(self.path / "config.json"))

    @cached_property
    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        found = {n: (i.dtype, i.shape) for n, i in self.folder.infos.items()}
        if self.block is None:
            return found
        named = str(self.folder.config.get("dtype") or self.folder.config.get("torch_dtype") or "bfloat16")
        dtype = getattr(torch, named.removeprefix("torch."), None)
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise UserError(f"{self.path / 'config.json'}: dtype {named!r} is none that weights can have")
        for name, (kind, shape) in list(found.items()):
            if kind == block_fp8.FP8:
                self._check_scale(name, shape)
                del found[name + block_fp8.SCALE]
                found[name] = dtype, shape
        return found

    def _check_scale(self, name: str, shape: tuple[int, ...]) -> None:
        info = self.folder.infos.get(name + block_fp8.SCALE)
        rows, columns = self.block or (1, 1)
        wanted = (math.ceil(shape[0] / rows), math.ceil(shape[1] / columns)) if len(shape) == 2 else None
        if info is None or wanted is None or info.shape != wanted:
            there = "is not there" if info is None else f"is {list(info.shape)}"
            raise UserError(f"{self.path}: {name} is FP8 {list(shape)}, but its scale {name + block_fp8.SCALE} {there}")

    def check(self, model: Model) -> None:
        """Raise UserError naming every missing, unknown or misshapen tensor."""
        shapes = {n: s for n, (_, s) in self.tensors.items()}
        check_source(model.table, shapes, model.family.ignored_names(model.dims), str(self.path))

    def read(self, name: str) -> Tensor:
        value = self.folder.tensor(name)
        if self.block is None or value.dtype != block_fp8.FP8:
            return value
        return block_fp8.dequantise(
            value, self.folder.tensor(name + block_fp8.SCALE), self.block, self.tensors[name][0]
        )

    def extents(self, name: str) -> list[Extent] | None:
        stored = self.folder.infos[name].dtype
        return [self.folder.extent(name)] if self.block is None or stored != block_fp8.FP8 else None


class MegatronSide:
    """A distributed checkpoint read through the mapping of its model's family.

    Raises UserError naming every parameter that is missing, stored in two ways or misshapen, and every model tensor
    of the checkpoint that no rule maps (optimiser states and `_extra_state` are passed over).
    """

    def __init__(self, path: Path, model: Model) -> None:
        self.path, self.model, self.reader = path, model, DistReader(find_dist(path))
        self._last = threading.local()  # what the last parameter gave: its tensors are asked for one by one
        keys = {k for k in self.reader.tensors if not _BESIDE.search(k)}
        self.prefix = _prefix(keys)
        self.slots: dict[str, list[Slot]] = {}
        problems = []
        used: set[str] = set()
        for name, entry in model.table.items():
            present = [v for v in variants(name, entry, model.dims) if all(self._key(s) in keys for s in v)]
            if len(present) != 1:
                problems.append(f"{'missing' if not present else 'stored in two ways'}: {name}")
                continue
            self.slots[name] = present[0]
            used.update(self._key(s) for s in present[0])
            problems += self._shape_problem(name, entry, present[0])
        tied = {self._key(Slot("output_layer.weight"))} if model.dims.tied else set()
        problems += [f"unknown tensor {k}" for k in sorted(keys - used - tied)]
        if problems:
            more = f"\n  ... and {len(problems) - 20} more" if len(problems) > 20 else ""
            raise UserError(f"{path}: does not fit config.json:\n  " + "\n  ".join(problems[:20]) + more)
        self.reader.check_files(sorted(used))

    def _key(self, slot: Slot) -> str:
        return self.prefix + slot.key

    def _shape_problem(self, name: str, entry: Entry, slots: Sequence[Slot]) -> list[str]:
        even = sum(shape[0] for shape in entry.shapes) // len(slots)
        for slot in slots:
            rows = slot.rows or even
            wanted = (*slot.leading, rows, *entry.shapes[0][1:])
            found = self.reader.tensors[self._key(slot)].size
            if entry.rule.layout == "vocab" and found:  # rows beyond the vocabulary are padding
                found = (min(found[0], rows), *found[1:])
            if found != wanted:
                return [f"{name} is {list(found)}, config.json says {list(wanted)}"]
        return []

    @cached_property
    def tensors(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        found = {}
        for name, entry in self.model.table.items():
            dtype = self.reader.tensors[self._key(self.slots[name][0])].dtype
            found.update({n: (dtype, s) for n, s in zip(entry.hf, entry.shapes, strict=True)})
        return found

    def read(self, name: str) -> Tensor:
        parameter, entry = self.model.entry_of[name]
        if getattr(self._last, "parameter", None) != parameter:
            self._last.parts = {}
            parts = [self.reader.read(self._key(s), s.index) for s in self.slots[parameter]]
            full = parts[0] if len(parts) == 1 else torch.cat(parts, 0)
            if entry.rule.layout == "vocab":
                full = full[: entry.shapes[0][0]]
            self._last.parts = dict(unpack(entry, full, self.model.dims))
            self._last.parameter = parameter
        result: Tensor = self._last.parts[name]
        return result

    def extents(self, name: str) -> list[Extent] | None:
        parameter, entry = self.model.entry_of[name]
        if getattr(self._last, "laid", None) != parameter:
            parts = [self.reader.extents(self._key(s), s.index) for s in self.slots[parameter]]
            whole = [p for p in parts if p is not None]
            self._last.extents = [e for p in whole for e in p] if len(whole) == len(parts) else None
            self._last.laid = parameter
        laid: list[Extent] | None = self._last.extents
        if laid is None:
            return None
        number = entry.hf.index(name)
        row = math.prod(entry.shapes[number][1:]) * self.tensors[name][0].itemsize
        runs = [run for run in row_runs(entry, self.model.dims) if run.part == number]
        return [e for run in runs for e in cut(laid, run.megatron * row, run.count * row)]


def _prefix(keys: set[str]) -> str:
    """What stands before "embedding." and "decoder." ("" for Megatron-LM, "module." or "model." for NeMo)."""
    for key in sorted(keys):
        before, found, _ = key.partition("embedding.word_embeddings.weight")
        if found:
            return before
    return ""


def find_dist(path: Path) -> Path:
    """The folder with metadata.json of a Megatron or NeMo 2.0 checkpoint, or UserError saying what is there instead."""
    candidates = [path, path / nemo.WEIGHTS, path / "model_weights"]
    tracker = path / TRACKER
    if tracker.is_file():
        step = tracker.read_text(encoding="utf-8", errors="replace").strip()
        candidates.insert(0, path / ("release" if step == "release" else f"iter_{step.zfill(7)}"))
        if not candidates[0].is_dir():
            raise UserError(f"{tracker}: names step {step!r}, but {candidates[0].name} is not there")
    for folder in candidates:
        if (folder / "metadata.json").is_file() and (folder / ".metadata").is_file():
            return folder
    if path.is_file() and path.suffix == ".nemo":
        raise UserError(
            f"{path}: a NeMo 1.0 archive; turn it into a NeMo 2.0 folder with {nemo.HOW}, then convert that folder"
        )
    for folder in [candidates[0], *candidates[1:], *sorted(path.glob("iter_*"))]:
        if any(folder.glob("mp_rank_*")):
            raise UserError(
                f"{folder}: one file a rank (Megatron's --ckpt-format torch); load it in Megatron-LM in its own layout "
                "and save it with --ckpt-format torch_dist"
            )
    if not path.exists():
        raise UserError(f"{path}: not there")
    raise UserError(
        f"{path}: no finished distributed checkpoint there (metadata.json and .metadata, or weights/ of NeMo 2.0)"
    )


def is_hf(path: Path) -> bool:
    """True for a folder with config.json and no Megatron checkpoint in it."""
    return (path / "config.json").is_file() and not (path / "metadata.json").is_file()


def config_folder(path: Path, source: Path | None) -> ModelFolder:
    """The Hugging Face config for a Megatron checkpoint: `source`, or the one that a conversion laid beside it."""
    beside = [path / HF_FILES, path]
    if (path.parent / TRACKER).is_file():  # the folder of one step of a checkpoint was given
        beside.append(path.parent / HF_FILES)
    for folder in [source] if source else beside:
        if (folder / "config.json").is_file():
            return ModelFolder(folder)
    raise UserError(
        f"{source or path}: no config.json of the model there; give --source FOLDER, a Hugging Face folder of the same "
        "model (its config and tokenizer; weights are not read)"
    )


def open_side(path: Path, model: Model | None, source: Path | None) -> Side:
    """Open either kind. `model` is taken for a Megatron side where it is given, else its config is looked up."""
    if is_hf(path):
        return HFSide(path)
    return MegatronSide(path, model or Model.of(config_folder(path, source)))
