"""`python -m checkpoint_tools.convert hf-to-megatron|megatron-to-hf SOURCE TARGET`: see docs/checkpoints.md."""

from __future__ import annotations

import argparse
import math
import os
import queue
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from checkpoint_tools import bridge, nemo
from checkpoint_tools.dist_writer import DistWriter
from checkpoint_tools.keys import Slot, Style, default_style, slots
from checkpoint_tools.sides import HF_FILES, TRACKER, HFSide, MegatronSide, Model, Side, config_folder
from pivotrl.errors import UserError
from pivotrl.models import block_fp8
from pivotrl.models.extents import Extent, cut
from pivotrl.models.folder import ModelFolder
from pivotrl.models.mapping import Entry, pack, row_runs
from pivotrl.models.output import Planned, SafetensorsWriter, carry_over, new_folder

DTYPES = {"keep": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp8": block_fp8.FP8}
WORKERS = min(4, os.cpu_count() or 1)


def hf_to_megatron(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    pad_vocab_to: int = 1,
    layers: Literal["auto", "stacked", "numbered"] = "auto",
    norms: Literal["te", "local"] = "te",
    nemo_context: Path | None = None,
    force: bool = False,
    workers: int = WORKERS,
) -> None:
    """Write the Megatron distributed checkpoint of a Hugging Face folder: TARGET/release, TARGET/hf and the tracker.

    Args: `dtype` None keeps each tensor's; the vocabulary's rows are padded with zeros to a multiple of
    `pad_vocab_to`; `layers` and `norms` choose names (checkpoint_tools/keys.py); `nemo_context`: the context/ of a
    NeMo 2.0 checkpoint of the same model, which makes TARGET one (weights/, context/). Raises UserError for bad input.
    """
    model = Model.of(ModelFolder(source))
    side = HFSide(source)
    side.check(model)
    style = default_style(model.dims, norms)
    if layers != "auto":
        style = Style(layers, norms)
    if style.layers == "stacked" and len(set(model.dims.kinds)) > 1:
        raise UserError("--layers stacked: layers of several kinds differ in shape; use numbered")
    context = None if nemo_context is None else nemo.context_of(nemo_context)
    prefix = "" if context is None else nemo.PREFIX
    need = sum(Planned(n, dtype or side.tensors[n][0], side.tensors[n][1]).nbytes for n in model.entry_of)
    with new_folder(target, need, force) as folder:
        weights = folder / ("release" if context is None else nemo.WEIGHTS)
        weights.mkdir()
        writer = DistWriter(weights)

        def write(name: str, entry: Entry, stream: int) -> None:
            pad = pad_vocab_to if entry.rule.layout == "vocab" else 1
            places = [replace(s, key=prefix + s.key) for s in slots(name, entry, model.dims, style)]
            _write_parameter(writer, places, side, model, entry, dtype, pad, stream)

        try:
            _in_threads(list(model.table.items()), write, workers)
            content = {"non_homogeneous_layers": style.layers == "numbered", "singleton_local_shards": False}
            writer.finish({"checkpoint_version": 3.0, "iteration": 0, "content_metadata": content})
        finally:
            writer.close()
        carry_over(source, folder / HF_FILES, dtype, {} if side.block is None else {"quantization_config": None})
        if context is None:
            (folder / TRACKER).write_text("release\n", encoding="utf-8")
        else:
            shutil.copytree(context, folder / nemo.CONTEXT)


def _write_parameter(
    writer: DistWriter,
    places: Sequence[Slot],
    side: Side,
    model: Model,
    entry: Entry,
    dtype: torch.dtype | None,
    pad: int,
    stream: int,
) -> None:
    """Write one megatron parameter to its places, rows padded with zeros to a multiple of `pad`.

    Its bytes are copied from where they lie if they are as they will be, else its tensors are read and packed.
    """
    stored = [side.tensors[n][0] for n in entry.hf]
    if dtype is None and len(set(stored)) > 1:
        raise UserError(f"{', '.join(entry.hf)}: of different dtypes, but one tensor in Megatron; give --dtype")
    kind = dtype or stored[0]
    laid = parameter_extents(side, entry, model) if set(stored) == {kind} else None
    full = torch.empty(0) if laid is not None else pack(entry, [side.read(n).to(kind) for n in entry.hf], model.dims)
    first, all_rows = 0, sum(shape[0] for shape in entry.shapes)
    for where in places:
        rows = where.rows or all_rows
        written = rows + -rows % pad
        shape = (written, *entry.shapes[0][1:])
        size, offsets = (*where.leading, *shape), (*where.index, *(0 for _ in shape))
        piece = (*(1 for _ in where.index), *shape)
        if laid is not None:
            row = math.prod(shape[1:]) * kind.itemsize
            writer.add_bytes(where.key, size, offsets, kind, piece, cut(laid, first * row, rows * row), stream)
        else:
            part = full.narrow(0, first, rows)
            if written > rows:
                part = torch.cat([part, part.new_zeros(written - rows, *shape[1:])])
            writer.add(where.key, size, offsets, part.reshape(piece), stream)
        first += rows


def parameter_extents(side: Side, entry: Entry, model: Model) -> list[Extent] | None:
    """Where the bytes of a whole megatron parameter lie in a side's Hugging Face tensors; None where they do not."""
    parts = [side.extents(name) for name in entry.hf]
    whole = [p for p in parts if p is not None]
    if len(whole) < len(parts):
        return None
    row = [math.prod(s[1:]) * side.tensors[n][0].itemsize for n, s in zip(entry.hf, entry.shapes, strict=True)]
    runs = row_runs(entry, model.dims)
    return [e for r in runs for e in cut(whole[r.part], r.hf * row[r.part], r.count * row[r.part])]


def megatron_to_hf(
    source: Path,
    target: Path,
    *,
    config_from: Path | None = None,
    dtype: torch.dtype | None = None,
    shard_bytes: int = 4 * 2**30,
    force: bool = False,
    workers: int = WORKERS,
) -> None:
    """Write the Hugging Face folder of a Megatron or NeMo 2.0 distributed checkpoint.

    Args: config, tokenizer and template come from `config_from`, or from what a conversion laid beside the checkpoint;
    `dtype` None keeps each tensor's, float8_e4m3fn quantises linear layers in blocks (pivotrl/models/block_fp8.py) and
    keeps the others'. Raises UserError for bad input.
    """
    carried = config_folder(source, config_from)
    model = Model.of(carried)
    side = MegatronSide(source, model)
    blocks = dtype == block_fp8.FP8
    kinds = {n: d if dtype is None or blocks else dtype for n, (d, _) in side.tensors.items()}
    tensors: list[Planned] = []
    for entry in model.table.values():
        for name, shape in zip(entry.hf, entry.shapes, strict=True):
            if blocks and block_fp8.quantised(entry):
                tensors.append(Planned(name, block_fp8.FP8, shape))
                tensors.append(Planned(name + block_fp8.SCALE, torch.float32, block_fp8.scale_shape(shape)))
            else:
                tensors.append(Planned(name, kinds[name], shape))
    with new_folder(target, sum(t.nbytes for t in tensors), force) as folder:
        writer = SafetensorsWriter(folder, tensors, shard_bytes)

        def write(_: str, entry: Entry, stream: int) -> None:
            for name in entry.hf:
                laid = side.extents(name) if kinds[name] == side.tensors[name][0] else None
                if blocks and block_fp8.quantised(entry):
                    values, scales = block_fp8.quantise(name, side.read(name))
                    writer.put(name, values)
                    writer.put(name + block_fp8.SCALE, scales)
                elif laid is not None:
                    writer.put_bytes(name, laid)
                else:
                    writer.put(name, side.read(name).to(kinds[name]))

        _in_threads(list(model.table.items()), write, workers)
        writer.finish()
        found = set(kinds.values())
        changes = {"quantization_config": block_fp8.config_of(model.table.values())} if blocks else {}
        carry_over(carried.path, folder, found.pop() if len(found) == 1 else None, changes)


def _in_threads(items: Sequence[tuple[str, Entry]], write: Callable[[str, Entry, int], None], workers: int) -> None:
    """Call write(name, entry, stream) for every item, in order, from `workers` threads numbered as streams."""
    waiting: queue.SimpleQueue[tuple[str, Entry]] = queue.SimpleQueue()
    for item in items:
        waiting.put(item)
    failed: list[BaseException] = []

    def work(stream: int) -> None:
        while not failed:
            try:
                name, entry = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                write(name, entry, stream)
            except BaseException as error:
                failed.append(error)

    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, range(workers)))
    if failed:
        raise failed[0]


def size_of(text: str) -> int:
    """Bytes of "4GB", "512MB" (powers of ten) or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if not match or float(match[1]) <= 0:
        raise UserError(f"--shard-size {text}: give a size such as 4GB or 512MB")
    return int(float(match[1]) * 1000 ** " KMGT".index(match[2].upper() or " "))


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m checkpoint_tools.convert", description=__doc__)
    commands = top.add_subparsers(dest="command", required=True)
    for name in ("hf-to-megatron", "megatron-to-hf"):
        command = commands.add_parser(name)
        command.add_argument("source", type=Path)
        command.add_argument("target", type=Path)
        command.add_argument("--force", action="store_true", help="replace an existing target")
        command.add_argument("--workers", type=_positive, default=WORKERS, help="threads")
        add_dtype = partial(command.add_argument, "--dtype", default="keep", help="default: as in the source")
        if name == "hf-to-megatron":
            add_dtype(choices=[d for d in DTYPES if d != "fp8"])
            command.add_argument("--pad-vocab-to", type=_positive, default=1, metavar="N", help="rows: a multiple of N")
            command.add_argument("--layers", choices=["auto", "stacked", "numbered"], default="auto")
            command.add_argument("--norms", choices=["te", "local"], default="te")
            command.add_argument(
                "--nemo-context",
                type=Path,
                metavar="FOLDER",
                help="of a NeMo 2.0 checkpoint: write one too",
            )
        else:
            add_dtype(choices=list(DTYPES))
            command.add_argument(
                "--source", dest="config_from", type=Path, help="Hugging Face folder: config, tokenizer"
            )
            command.add_argument("--shard-size", default="4GB")
    return top


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        if args.command == "hf-to-megatron":
            if not bridge.known(ModelFolder(args.source)):
                bridge.import_checkpoint(args.source, args.target, args.force)
            else:
                hf_to_megatron(
                    args.source,
                    args.target,
                    dtype=DTYPES[args.dtype],
                    pad_vocab_to=args.pad_vocab_to,
                    layers=args.layers,
                    norms=args.norms,
                    nemo_context=args.nemo_context,
                    force=args.force,
                    workers=args.workers,
                )
        else:
            carried = config_folder(args.source, args.config_from)
            if not bridge.known(carried):
                bridge.export_checkpoint(carried.path, args.source, args.target, args.force)
            else:
                megatron_to_hf(
                    args.source,
                    args.target,
                    config_from=args.config_from,
                    dtype=DTYPES[args.dtype],
                    shard_bytes=size_of(args.shard_size),
                    force=args.force,
                    workers=args.workers,
                )
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{args.target}: written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
