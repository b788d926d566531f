"""Hugging Face model folders: config.json and lazily read safetensors (one file, or sharded with an index)."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pivotrl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class ModelFolder:
    """A Hugging Face model on disk. Tensors are read one at a time, so that a rank never holds the whole model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files: dict[str, Any] = {}

    @cached_property
    def config(self) -> dict[str, Any]:
        file = self.path / "config.json"
        if not file.is_file():
            raise UserError(f"{self.path}: no config.json there; give the folder of a Hugging Face model")
        with file.open(encoding="utf-8") as handle:
            config: dict[str, Any] = json.load(handle)
        return config

    @cached_property
    def file_of(self) -> dict[str, str]:
        """Tensor name -> file name. Raises UserError where the index and the files disagree."""
        if (self.path / INDEX).is_file():
            with (self.path / INDEX).open(encoding="utf-8") as handle:
                weight_map: dict[str, str] = json.load(handle)["weight_map"]
            absent = sorted({f for f in weight_map.values() if not (self.path / f).is_file()})
            if absent:
                raise UserError(
                    f"{self.path / INDEX}: names files that are not there: {', '.join(absent)}; fetch the model again"
                )
            return weight_map
        if (self.path / SINGLE).is_file():
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        raise UserError(f"{self.path}: no {SINGLE} nor {INDEX}; convert the weights to safetensors")

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, without reading any."""
        return {n: tuple(self._open(f).get_slice(n).get_shape()) for n, f in self.file_of.items()}

    def tensor(self, name: str) -> Tensor:
        """Read one tensor. Raises UserError with the name where the folder lacks it."""
        if name not in self.file_of:
            raise UserError(f"{self.path}: no tensor {name}")
        tensor: Tensor = self._open(self.file_of[name]).get_tensor(name)
        return tensor

    def close(self) -> None:
        """Let go of the memory-mapped files."""
        self._files.clear()

    def _open(self, name: str) -> Any:
        if name not in self._files:
            from safetensors import safe_open

            self._files[name] = safe_open(str(self.path / name), framework="pt")
        return self._files[name]
