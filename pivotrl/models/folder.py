"""Hugging Face model folders: config.json and lazily read safetensors (one file, or sharded with an index)."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pivotrl.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from pivotrl.models.extents import Extent
    from pivotrl.models.safetensors_header import TensorInfo

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT_FILES = ("*.safetensors", "*.safetensors.index.json", "*.bin", "*.bin.index.json", "*.gguf", "*.pt", "*.pth")


def weight_map(index: Path, content: Any) -> dict[str, str]:
    """Tensor name -> file name, of the `content` of an index. Raises UserError where one is no file of its folder."""
    found = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(found, dict) or not all(isinstance(f, str) for f in found.values()):
        raise UserError(f"{index}: weight_map must be an object of tensor name -> file name")
    for name, file in found.items():
        if not file or "\0" in file or Path(file).name != file or len(file.encode("utf-8", "surrogatepass")) > 255:
            raise UserError(f"{index}: tensor {name}: {file!r} is not the name of a file in this folder")
    return found


class ModelFolder:
    """A Hugging Face model on disk. Tensors are read one at a time, so that a rank never holds the whole model."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._headers: dict[str, dict[str, TensorInfo]] = {}

    @cached_property
    def config(self) -> dict[str, Any]:
        from pivotrl.models.safetensors_header import read_json_object

        file = self.path / "config.json"
        if not file.is_file():
            raise UserError(f"{self.path}: no config.json there; give the folder of a Hugging Face model")
        return read_json_object(file)

    @cached_property
    def file_of(self) -> dict[str, str]:
        """Tensor name -> file name. Raises UserError where the index and the files disagree."""
        from pivotrl.models.safetensors_header import read_json_object

        index = self.path / INDEX
        if not index.is_file():
            if (self.path / SINGLE).is_file():
                return dict.fromkeys(self._header(SINGLE), SINGLE)
            raise UserError(f"{self.path}: no {SINGLE} nor {INDEX}; convert the weights to safetensors")
        names = weight_map(index, read_json_object(index))
        absent = sorted({f for f in names.values() if not (self.path / f).is_file()})
        if absent:
            raise UserError(f"{index}: names files that are not there: {', '.join(absent)}; fetch the model again")
        held: dict[str, str] = {}
        for file in sorted(set(names.values())):
            for name in self._header(file):
                if name in held:
                    raise UserError(f"{self.path}: tensor {name} is both in {held[name]} and in {file}; remove one")
                held[name] = file
        wrong = [f"{n} is not in {f}" for n, f in sorted(names.items()) if held.get(n) != f]
        wrong += [f"{n} of {f} is not in the index" for n, f in sorted(held.items()) if n not in names]
        if wrong:
            raise UserError(f"{index}: does not fit the files: {'; '.join(wrong[:10])}; fetch the model again")
        return names

    @cached_property
    def infos(self) -> dict[str, TensorInfo]:
        """Shape, dtype and place of every tensor, without reading any."""
        return {n: self._header(f)[n] for n, f in self.file_of.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, without reading any."""
        return {n: info.shape for n, info in self.infos.items()}

    def tensor(self, name: str) -> Tensor:
        """Read one tensor into memory. Raises UserError with the name where the folder lacks it."""
        from pivotrl.models.safetensors_header import read_tensor

        if name not in self.file_of:
            raise UserError(f"{self.path}: no tensor {name}")
        return read_tensor(self.path / self.file_of[name], name, self.infos[name])

    def extent(self, name: str) -> Extent:
        """Where the bytes of one tensor lie. Raises UserError with the name where the folder lacks it."""
        if name not in self.file_of:
            raise UserError(f"{self.path}: no tensor {name}")
        return self.infos[name].extent(self.path / self.file_of[name])

    def close(self) -> None:
        """Forget the headers; nothing is kept open between reads."""
        self._headers.clear()

    def _header(self, name: str) -> dict[str, TensorInfo]:
        from pivotrl.models.safetensors_header import read_header

        if name not in self._headers:
            self._headers[name] = read_header(self.path / name)
        return self._headers[name]
