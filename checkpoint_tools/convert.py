"""`python -m checkpoint_tools.convert hf-to-megatron|megatron-to-hf SOURCE TARGET`: see docs/checkpoints.md."""

from __future__ import annotations

import argparse
import os
import queue
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import torch

from checkpoint_tools import bridge
from checkpoint_tools.dist_format import DistWriter, without_checksums
from checkpoint_tools.keys import Style, default_style, slot
from checkpoint_tools.output import Planned, carry_over, new_folder, plan_files, write_safetensors
from checkpoint_tools.sides import HF_FILES, TRACKER, HFSide, MegatronSide, Model, config_folder
from pivotrl.errors import UserError
from pivotrl.models.folder import ModelFolder
from pivotrl.models.mapping import Entry, pack

DTYPES = {"keep": None, "bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
WORKERS = min(4, os.cpu_count() or 1)


def hf_to_megatron(
    source: Path,
    target: Path,
    *,
    dtype: torch.dtype | None = None,
    pad_vocab_to: int = 1,
    layers: Literal["auto", "stacked", "numbered"] = "auto",
    norms: Literal["te", "local"] = "te",
    force: bool = False,
    workers: int = WORKERS,
) -> None:
    """Write the Megatron distributed checkpoint of a Hugging Face folder: TARGET/release, TARGET/hf and the tracker.

    Args: `dtype` None keeps each tensor's; the vocabulary's rows are padded with zeros to a multiple of
    `pad_vocab_to`; `layers` and `norms` choose names (checkpoint_tools/keys.py). Raises UserError for bad input.
    """
    model = Model.of(ModelFolder(source))
    side = HFSide(source)
    side.check(model)
    style = default_style(model.dims, norms)
    if layers != "auto":
        style = Style(layers, norms)
    if style.layers == "stacked" and len(set(model.dims.moe_layers)) > 1:
        raise UserError("--layers stacked: dense and expert layers differ in shape; use numbered")
    sizes = side.tensors
    need = sum(Planned(n, dtype or sizes[n][0], sizes[n][1]).nbytes for n in model.entry_of)
    with new_folder(target, need, force) as folder:
        (folder / "release").mkdir()
        writer = DistWriter(folder / "release")

        def write(name: str, entry: Entry, stream: int) -> None:
            parts = [side.read(n) for n in entry.hf]
            parts = [p.to(dtype or p.dtype) for p in parts]
            if len({p.dtype for p in parts}) > 1:
                raise UserError(f"{', '.join(entry.hf)}: of different dtypes, but one tensor in Megatron; give --dtype")
            full = pack(entry, parts, model.dims)
            del parts
            if entry.rule.layout == "vocab" and (rows := -full.shape[0] % pad_vocab_to):
                full = torch.cat([full, full.new_zeros(rows, *full.shape[1:])])
            where = slot(name, entry, model.dims, style)
            size = (*where.leading, *full.shape)
            offsets = (*where.index, *(0 for _ in full.shape))
            writer.add(where.key, size, offsets, full[(None,) * len(where.index)], stream)

        with without_checksums():
            _in_threads(list(model.table.items()), write, workers)
        content = {"non_homogeneous_layers": style.layers == "numbered", "singleton_local_shards": False}
        writer.finish({"checkpoint_version": 3.0, "iteration": 0, "content_metadata": content})
        carry_over(source, folder / HF_FILES, dtype)
        (folder / TRACKER).write_text("release\n", encoding="utf-8")


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
    `dtype` None keeps each tensor's. Raises UserError for bad input.
    """
    carried = config_folder(source, config_from)
    side = MegatronSide(source, Model.of(carried))
    tensors = [Planned(n, dtype or d, s) for n, (d, s) in side.tensors.items()]
    with new_folder(target, sum(t.nbytes for t in tensors), force) as folder:
        files = plan_files(tensors, shard_bytes)
        write_safetensors(folder, files, lambda n: side.read(n) if dtype is None else side.read(n).to(dtype), workers)
        found = {t.dtype for t in tensors}
        carry_over(carried.path, folder, found.pop() if len(found) == 1 else None)


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
        command.add_argument("--dtype", choices=list(DTYPES), default="keep", help="default: as in the source")
        command.add_argument("--force", action="store_true", help="replace an existing target")
        command.add_argument("--workers", type=_positive, default=WORKERS, help="threads; each holds one parameter")
        if name == "hf-to-megatron":
            command.add_argument("--pad-vocab-to", type=_positive, default=1, metavar="N", help="rows: a multiple of N")
            command.add_argument("--layers", choices=["auto", "stacked", "numbered"], default="auto")
            command.add_argument("--norms", choices=["te", "local"], default="te")
        else:
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
