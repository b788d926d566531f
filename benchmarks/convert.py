"""Seconds and peak memory of converting a synthetic checkpoint, both ways, against copying its bytes (all fsynced)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.common import Comparison, median, parser, show

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 1024,
    "vocab_size": 32000,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 3072,
    "num_experts": 32,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "dtype": "bfloat16",
}


def synthetic(folder: Path, megabytes: float) -> int:
    """A Qwen3-MoE folder of about that size with random bfloat16 weights, in files of 256 MB; returns its bytes."""
    import torch

    from checkpoint_tools.sides import Model
    from pivotrl.models.folder import ModelFolder
    from pivotrl.models.output import Planned, SafetensorsWriter

    folder.mkdir()

    def tensors(layers: int) -> list[Planned]:
        (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
        entries = Model.of(ModelFolder(folder)).table.values()
        return [Planned(n, torch.bfloat16, s) for e in entries for n, s in zip(e.hf, e.shapes, strict=True)]

    one, two = (sum(t.nbytes for t in tensors(n)) for n in (1, 2))
    planned = tensors(max(1, round((megabytes * 1e6 - one) / (two - one)) + 1))
    writer = SafetensorsWriter(folder, planned, 256 * 10**6)
    longest = max(torch.Size(t.shape).numel() for t in planned)
    values = torch.randint(0, 2**14, (longest + len(planned),), dtype=torch.int16).view(torch.bfloat16)  # none is NaN
    for number, t in enumerate(planned):
        writer.put(t.name, values[number : number + torch.Size(t.shape).numel()].reshape(t.shape))
    writer.finish()
    return sum(t.nbytes for t in planned)


def memory_mb() -> dict[str, float]:
    """Peak resident memory of this program, and what of its memory is files (libraries) at this moment.

    The conversion maps no data, so that resident memory holds no page cache of the checkpoint; getrusage would count
    the peak of the process that started this one.
    """
    status = Path("/proc/self/status").read_text()
    values = {key: int(status.partition(key + ":")[2].split()[0]) * 1024 / 1e6 for key in ("VmHWM", "RssFile")}
    return {"peak": values["VmHWM"], "files": values["RssFile"]}


def child(direction: str, source: str, target: str) -> None:
    """One conversion in a process of its own, so that its peak memory is its own. Prints one JSON object."""
    from checkpoint_tools import convert

    convert.parser()  # everything is imported before the clock starts
    before = memory_mb()
    shutil.rmtree(target, ignore_errors=True)
    start, cpu = time.perf_counter(), time.process_time()
    code = convert.main([direction, source, target])
    took = {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}
    after = memory_mb()
    print(json.dumps({**took, "peak_mb": after["peak"], "files_mb": after["files"], "imports_mb": before["peak"]}))
    sys.exit(code)


def copy(source: Path, target: Path) -> dict[str, float]:
    shutil.rmtree(target, ignore_errors=True)
    start, cpu = time.perf_counter(), time.process_time()
    target.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
        with (target / file.name).open("rb+") as written:
            os.fsync(written.fileno())
    return {"seconds": time.perf_counter() - start, "cpu": time.process_time() - cpu}


def convert_once(way: str, source: Path, target: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.convert", "child", way, str(source), str(target)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    row: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return row


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--megabytes", type=float, default=512, help="size of the checkpoint (default 512)")
    arguments.add_argument("--folder", help="where to write (default: the system's folder for temporary files)")
    options = arguments.parse_args()
    ways = {"hf-to-megatron": ("hf", "megatron"), "megatron-to-hf": ("megatron", "back")}
    rows: dict[str, list[dict[str, float]]] = {"copy": [], **{way: [] for way in ways}}
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        root = Path(scratch)
        size = synthetic(root / "hf", options.megabytes)
        for _ in range(options.repeats):
            rows["copy"].append(copy(root / "hf", root / "copy"))
            shutil.rmtree(root / "copy")  # so that the disk holds three copies at most
            for way, (source, target) in ways.items():
                rows[way].append(convert_once(way, root / source, root / target))
            shutil.rmtree(root / "back")

    def seconds(side: str) -> float:
        return median([row["seconds"] for row in rows[side]])

    slower = max(ways, key=seconds)
    details: dict[str, object] = {"copy cpu seconds": round(median([row["cpu"] for row in rows["copy"]]), 2)}
    for way in ways:
        details[f"{way} seconds"] = round(seconds(way), 2)
        details[f"{way} cpu seconds"] = round(median([row["cpu"] for row in rows[way]]), 2)
        details[f"{way} peak MB"] = round(max(row["peak_mb"] for row in rows[way]))
        details[f"{way} peak MB without libraries"] = round(max(r["peak_mb"] - r["files_mb"] for r in rows[way]))
    result = Comparison(
        benchmark="convert",
        measured=f"{size / 1e6:.0f} MB of Qwen3-MoE in bfloat16, the slower way ({slower})",
        unit="seconds",
        ours=seconds(slower),
        theirs=seconds("copy"),
        theirs_is="copying the files",
        better="lower",
        details={
            **details,
            "imports alone MB": round(max(row["imports_mb"] for row in rows[slower])),
            "repeats": options.repeats,
        },
    )
    show(result, as_json=options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
    main()
