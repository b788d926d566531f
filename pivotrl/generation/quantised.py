"""Engines whose model folder holds FP8 weights in blocks: the trainer's weights become those values and their scales.

A rank quantises the part that it serves. A block's scale depends on the block alone, so the parts of all ranks are, to
the bit, those of the whole quantised tensor, as long as no rank's part cuts a block.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pivotrl.errors import UserError
from pivotrl.models import block_fp8
from pivotrl.refit.layout import Box

if TYPE_CHECKING:
    from torch import Tensor

    from pivotrl.generation.refit_check import Shape


class Quantiser:
    """`shapes`: of all weights of the folder, scales included."""

    def __init__(self, shapes: dict[str, Shape]) -> None:
        self._names = frozenset(name for name in shapes if name + block_fp8.SCALE in shapes)

    @classmethod
    def of(cls, folder: Path, shapes: dict[str, Shape]) -> Quantiser | None:
        """None for a folder of plain weights. Raises UserError for another quantisation than FP8 in blocks of 128."""
        path = folder / "config.json"
        size = block_fp8.block_size(json.loads(path.read_text(encoding="utf-8")), str(path))
        if size is None:
            return None
        if size != (block_fp8.BLOCK, block_fp8.BLOCK):
            raise UserError(f"{path}: weight_block_size {list(size)}; refits quantise in blocks of {block_fp8.BLOCK}")
        return cls(shapes)

    def quantises(self, name: str, part: Tensor) -> bool:
        """True for a weight that the engine serves in FP8 and the trainer does not send so."""
        return name in self._names and part.dtype != block_fp8.FP8

    def split(self, name: str, part: Tensor) -> Iterator[tuple[str, Tensor]]:
        """The weight in FP8, then its scales."""
        values, scales = block_fp8.quantise(name, part)
        yield name, values
        yield name + block_fp8.SCALE, scales

    def scale_boxes(self, boxes: dict[str, Box | None], shapes: dict[str, Shape]) -> dict[str, Box | None]:
        """Where a rank's scales lie, from where its weights lie. Raises UserError where a rank cuts a block."""
        found: dict[str, Box | None] = {}
        for name in self._names & boxes.keys():
            box = boxes[name]
            if box is None:
                continue
            for (start, stop), size in zip(box, shapes[name], strict=True):
                if start % block_fp8.BLOCK or (stop % block_fp8.BLOCK and stop != size):
                    raise UserError(
                        f"generation.tensor_parallel: a rank's part {list(box)} of {name} cuts an FP8 block of "
                        f"{block_fp8.BLOCK}; use fewer ranks, or an engine in bfloat16"
                    )
            found[name + block_fp8.SCALE] = tuple(
                (start // block_fp8.BLOCK, -(-stop // block_fp8.BLOCK)) for start, stop in box
            )
        return found
