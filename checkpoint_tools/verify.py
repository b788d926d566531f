"""`python -m checkpoint_tools.verify A B`: are two checkpoints the same weights? Hugging Face, Megatron or one of each.

Compares names, shapes, dtypes and values under Hugging Face names; exits with 0 where they are the same, else 1.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from checkpoint_tools.convert import megatron_to_hf
from checkpoint_tools.sides import HFSide, Model, Side, config_folder, is_hf, open_side
from pivotrl.errors import UserError
from pivotrl.models.folder import ModelFolder

BLOCK = 2**22  # elements that are compared at once, in float64


@dataclass
class Comparison:
    """What differs between two checkpoints. `differences`: greatest absolute difference by name, of those above 0."""

    compared: int = 0
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    shapes: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    differences: dict[str, float] = field(default_factory=dict)
    logits: float | None = None

    def same(self, tolerance: float) -> bool:
        """True where names, shapes and dtypes agree and no value (nor logit) differs by more than `tolerance`."""
        worst = max(self.differences.values(), default=0.0)  # NaN is handled where it is found: it counts as infinite
        near = worst <= tolerance and (self.logits is None or self.logits <= max(tolerance, 1e-5))
        return near and not (self.only_a or self.only_b or self.shapes or self.dtypes)


def max_difference(a: Tensor, b: Tensor) -> float:
    """Greatest absolute difference; infinite where one value is NaN and the other is not. Shapes must agree."""
    worst = 0.0
    for x, y in zip(a.reshape(-1).split(BLOCK), b.reshape(-1).split(BLOCK), strict=True):
        if x.dtype == y.dtype and torch.equal(x.view(torch.uint8), y.view(torch.uint8)):
            continue
        x, y = x.double(), y.double()
        gap = (x - y).abs().masked_fill((x == y) | (x.isnan() & y.isnan()), 0.0)
        worst = max(worst, gap.nan_to_num(nan=float("inf")).max().item())
    return worst


def compare(a: Side, b: Side, optional: Sequence[str] = ()) -> Comparison:
    """Compare tensor by tensor, two in memory at a time. `optional`: patterns of names that one side may lack."""
    left, right, result = a.tensors, b.tensors, Comparison()

    def alone(names: set[str]) -> list[str]:
        return sorted(n for n in names if not any(re.fullmatch(p, n) for p in optional))

    result.only_a, result.only_b = alone(set(left) - set(right)), alone(set(right) - set(left))
    for name in left:
        if name not in right:
            continue
        (dtype_a, shape_a), (dtype_b, shape_b) = left[name], right[name]
        if dtype_a != dtype_b:
            result.dtypes.append(f"{name}: {_short(dtype_a)} and {_short(dtype_b)}")
        if shape_a != shape_b:
            result.shapes.append(f"{name}: {list(shape_a)} and {list(shape_b)}")
            continue
        result.compared += 1
        if gap := max_difference(a.read(name), b.read(name)):
            result.differences[name] = gap
    return result


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def logits(path: Path, source: Path | None, prompt: str) -> Tensor:
    """Logits of a prompt by transformers in float32, [tokens, vocabulary]; a Megatron checkpoint is converted first."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with tempfile.TemporaryDirectory() as scratch:
        folder = path
        if not is_hf(path):
            folder = Path(scratch) / "hf"
            megatron_to_hf(path, folder, config_from=source)
        if not any(folder.glob("tokenizer*")):
            raise UserError(f"{path}: --prompt needs a tokenizer beside the model; copy tokenizer.json there")
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        if ids.numel() == 0:
            raise UserError("--prompt: it has no tokens; give some text")
        with torch.no_grad():
            out: Tensor = model(ids).logits[0]
    return out


def verify(a: Path, b: Path, source: Path | None = None, prompt: str | None = None) -> Comparison:
    """Compare two checkpoints of either kind. Raises UserError where one cannot be read."""
    model: Model | None = None
    optional: tuple[str, ...] = ()
    if is_hf(a) and is_hf(b):
        architectures = ModelFolder(a).config.get("architectures"), ModelFolder(b).config.get("architectures")
        if architectures[0] != architectures[1]:
            raise UserError(f"{a} is {architectures[0]}, {b} is {architectures[1]}: different models")
    else:
        given = source or (a if is_hf(a) else b if is_hf(b) else None)
        folder = config_folder(a, given)
        model = Model.of(folder)
        optional = model.family.ignored_names(model.dims)
        for path in (a, b):
            if is_hf(path):
                HFSide(path).check(model)
    result = compare(open_side(a, model, source), open_side(b, model, source), optional)
    if prompt is not None and not result.shapes:
        one, two = (logits(path, source or (a if is_hf(a) else b if is_hf(b) else None), prompt) for path in (a, b))
        result.logits = max_difference(one, two) if one.shape == two.shape else float("inf")
    return result


def report(result: Comparison, tolerance: float, limit: int = 20) -> str:
    """Lines for a person: every kind of difference, the worst values first."""
    lines = []
    for title, items in (
        ("only in A", result.only_a),
        ("only in B", result.only_b),
        ("shape differs", result.shapes),
        ("dtype differs", result.dtypes),
        (
            "value differs",
            [f"{n}: by {d:.3g}" for n, d in sorted(result.differences.items(), key=lambda i: (-i[1], i[0]))],
        ),
    ):
        lines += [f"{title}: {item}" for item in items[:limit]]
        if len(items) > limit:
            lines.append(f"{title}: ... and {len(items) - limit} more")
    if result.logits is not None:
        lines.append(f"logits: greatest difference {result.logits:.3g}")
    worst = max(result.differences.values(), default=0.0)
    verdict = "the same" if result.same(tolerance) else "DIFFERENT"
    lines.append(f"{verdict}: {result.compared} tensors compared, greatest difference {worst:.3g}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m checkpoint_tools.verify", description=__doc__)
    parser.add_argument("a", type=Path)
    parser.add_argument("b", type=Path)
    parser.add_argument("--source", type=Path, help="Hugging Face folder whose config a Megatron side has")
    parser.add_argument("--prompt", help="compare logits of this text as well (small models: both are loaded whole)")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="greatest absolute difference that is still the same"
    )
    args = parser.parse_args(argv)
    try:
        result = verify(args.a, args.b, args.source, args.prompt)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(report(result, args.tolerance))
    return 0 if result.same(args.tolerance) else 1


if __name__ == "__main__":
    sys.exit(main())
