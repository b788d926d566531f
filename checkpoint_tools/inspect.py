"""`python -m checkpoint_tools.inspect DIR`: what a checkpoint is, its step, and a tree of its tensors with sizes."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from checkpoint_tools.dist_format import DistReader
from checkpoint_tools.keys import default_style, sizes
from checkpoint_tools.sides import Model, find_dist, is_hf, open_side
from pivotrl.errors import UserError
from pivotrl.models.extents import bytes_of
from pivotrl.models.folder import ModelFolder

Tensors = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def nbytes(dtype: torch.dtype, shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def human(size: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def structure(tensors: Tensors) -> str:
    """Fingerprint of names, dtypes and shapes (not of values): equal for the same model in the same format."""
    rows = sorted(f"{n} {d} {list(s)}" for n, (d, s) in tensors.items())
    return hashlib.sha256("\n".join(rows).encode("utf-8", "surrogatepass")).hexdigest()[:16]


def fingerprint(path: Path, source: Path | None) -> str:
    """Fingerprint of values, names, dtypes and shapes under Hugging Face names; reads every byte.

    Equal for the same weights in every format and layout. Raises UserError as `verify` does.
    """
    side = open_side(path, None, source)
    total = hashlib.sha256()
    for name, (dtype, shape) in sorted(side.tensors.items()):
        digest = hashlib.sha256(f"{name} {dtype} {list(shape)}".encode("utf-8", "surrogatepass"))
        digest.update(bytes_of(side.read(name)))
        total.update(digest.digest())
    return total.hexdigest()[:16]


def tree(tensors: Tensors, depth: int) -> list[str]:
    """Lines of a tree over the parts of names; numbered siblings of one kind (layers, experts) stand in one line."""
    groups: dict[str, list[tuple[str, torch.dtype, tuple[int, ...]]]] = {}
    for name, (dtype, shape) in tensors.items():
        groups.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append((name, dtype, shape))
    root: dict[str, Any] = {}
    for pattern, members in groups.items():
        node = root
        for part in pattern.split("."):
            node = node.setdefault(part, {})
        node[""] = members
    lines: list[str] = []

    def total(node: Mapping[str, Any]) -> int:
        own = sum(nbytes(d, s) for _, d, s in node.get("", []))
        return own + sum(total(child) for part, child in node.items() if part)

    def walk(node: Mapping[str, Any], level: int) -> None:
        for part, child in node.items():
            if not part:
                continue
            while len(child) == 1 and "" not in child:  # a chain without branches in one line
                (next_part,) = child
                part, child = f"{part}.{next_part}", child[next_part]
            text = f"{'  ' * level}{part:<{max(1, 52 - 2 * level)}} {human(total(child)):>11}"
            if members := child.get(""):
                kinds = sorted({f"{str(d).removeprefix('torch.')} {list(s)}" for _, d, s in members})
                text += f"  {len(members)} x " + (", ".join(kinds) if len(kinds) <= 3 else f"{len(kinds)} shapes")
            lines.append(text)
            if level + 1 < depth:
                walk(child, level + 1)

    walk(root, 0)
    return lines


def config_only(folder: ModelFolder) -> dict[str, Any]:
    """Facts about a model of which only config.json is there: names and shapes on both sides of a conversion."""
    model = Model.of(folder)
    style = default_style(model.dims)
    named = str(folder.config.get("dtype") or folder.config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    dtype = getattr(torch, named, None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"{folder.path / 'config.json'}: dtype {named!r} is none that weights can have")
    shapes = [(n, s) for e in model.table.values() for n, s in zip(e.hf, e.shapes, strict=True)]
    return {
        "kind": "Hugging Face config without weights",
        "architecture": ", ".join(model.family.architectures),
        "layout": f"layers {style.layers} in Megatron",
        "tensors": {n: (dtype, s) for n, s in shapes},
        "megatron": {k: (dtype, s) for k, s in sizes(model.table, model.dims, style).items()},
    }


def describe(path: Path) -> dict[str, Any]:
    """Facts about a checkpoint: kind, step, layout, bytes, and its tensors under "tensors"."""
    facts: dict[str, Any]
    if is_hf(path) and not any(path.glob("*.safetensors*")):
        facts = config_only(ModelFolder(path))
        tensors: Tensors = facts["tensors"]
    elif is_hf(path):
        folder = ModelFolder(path)
        tensors = {n: (i.dtype, i.shape) for n, i in folder.infos.items()}
        facts = {
            "kind": "Hugging Face folder",
            "architecture": ", ".join(map(str, folder.config.get("architectures") or ["unknown"])),
            "files": len(set(folder.file_of.values())),
        }
    else:
        place = find_dist(path)
        reader = DistReader(place)
        reader.check_files(sorted(reader.tensors))
        tensors = {k: (t.dtype, t.size) for k, t in reader.tensors.items()}
        nemo = (path / "context").is_dir() or (place.parent / "context").is_dir()
        numbered = any(re.search(r"decoder\.layers\.\d+\.", k) for k in tensors)
        pieces = [p for t in reader.tensors.values() for p in t.pieces]
        facts = {
            "kind": ("NeMo 2.0 folder, " if nemo else "") + "megatron-core distributed checkpoint (torch_dist)",
            "folder": str(place),
            "step": reader.common.get("iteration", reader.common.get("global_step", "not recorded")),
            "layout": f"layers {'numbered' if numbered else 'stacked'}; loads in any parallel layout",
            "files": len({p.file for p in pieces}),
            "pieces": len(pieces),
            "objects": len(reader.objects),
            "optimizer": any("optimizer." in k for k in tensors),
        }
    facts["bytes"] = sum(nbytes(d, s) for d, s in tensors.values())
    facts["parameters"] = sum(math.prod(s) for n, (_, s) in tensors.items() if "optimizer." not in n)
    return {**facts, "structure": structure(tensors), "tensors": tensors}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m checkpoint_tools.inspect", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--depth", type=int, default=8, help="levels of the tree")
    parser.add_argument("--values", action="store_true", help="fingerprint of all values too (reads everything)")
    parser.add_argument("--source", type=Path, help="Hugging Face folder of the config (for --values)")
    parser.add_argument("--json", action="store_true", help="facts as one line of JSON, without the tree")
    args = parser.parse_args(argv)
    try:
        facts = describe(args.folder)
        if args.values:
            facts["fingerprint"] = fingerprint(args.folder, args.source)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    tensors, megatron = facts.pop("tensors"), facts.pop("megatron", None)
    if args.json:
        print(json.dumps({**facts, "count": len(tensors)}))
        return 0
    for key, value in facts.items():
        print(f"{key:<13} {human(value) if key == 'bytes' else f'{value:,}' if key == 'parameters' else value}")
    print("\n".join(tree(tensors, args.depth)))
    if megatron is not None:
        print("\n".join(["in Megatron:", *tree(megatron, args.depth)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
