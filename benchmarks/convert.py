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

    from checkpoint_tools.output import Planned, plan_files, write_safetensors
    from checkpoint_tools.sides import Model
    from pivotrl.models.folder import ModelFolder

    folder.mkdir()

    def tensors(layers: int) -> list[Planned]:
        (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
        entries = Model.of(ModelFolder(folder)).table.values()
        return [Planned(n, torch.bfloat16, s) for e in entries for n, s in zip(e.hf, e.shapes, strict=True)]

    one, two = (sum(t.nbytes for t in tensors(n)) for n in (1, 2))
    planned = tensors(max(1, round((megabytes * 1e6 - one) / (two - one)) + 1))
    shapes = {t.name: t.shape for t in planned}
    write_safetensors(folder, plan_files(planned, 256 * 10**6), lambda n: torch.rand(shapes[n]).bfloat16(), 1)
    return sum(t.nbytes for t in planned)


def peak_megabytes() -> float:
    """Peak resident memory of this program (getrusage would count that of the process that started it)."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024 / 1e6


def child(direction: str, source: str, target: str) -> None:
    """One conversion in a process of its own, so that its peak memory is its own. Prints one JSON object."""
    from checkpoint_tools import convert

    convert.parser()  # everything is imported before the clock starts
    before = peak_megabytes()
    start = time.perf_counter()
    code = convert.main([direction, source, target, "--force"])
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "peak_mb": peak_megabytes(), "imports_mb": before}))
    sys.exit(code)


def copy(source: Path, target: Path) -> float:
    shutil.rmtree(target, ignore_errors=True)
    start = time.perf_counter()
    target.mkdir()
    for file in source.iterdir():
        shutil.copyfile(file, target / file.name)
        with (target / file.name).open("rb+") as written:
            os.fsync(written.fileno())
    return time.perf_counter() - start


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--megabytes", type=float, default=512, help="size of the checkpoint (default 512)")
    arguments.add_argument("--folder", help="where to write (default: the system's folder for temporary files)")
    options = arguments.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as scratch:
        root = Path(scratch)
        size = synthetic(root / "hf", options.megabytes)
        ways = {"hf-to-megatron": ("hf", "megatron"), "megatron-to-hf": ("megatron", "back")}
        seconds: dict[str, list[float]] = {"copy": [], **{way: [] for way in ways}}
        peak: dict[str, float] = dict.fromkeys(ways, 0.0)
        imports = 0.0
        for _ in range(options.repeats):
            seconds["copy"].append(copy(root / "hf", root / "copy"))
            for way, (source, target) in ways.items():
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.convert",
                    "child",
                    way,
                    f"{root}/{source}",
                    f"{root}/{target}",
                ]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                row = json.loads(done.stdout.splitlines()[-1])
                seconds[way].append(row["seconds"])
                peak[way], imports = max(peak[way], row["peak_mb"]), row["imports_mb"]
    slower = max(ways, key=lambda way: median(seconds[way]))
    result = Comparison(
        benchmark="convert",
        measured=f"{size / 1e6:.0f} MB of Qwen3-MoE in bfloat16, the slower way ({slower})",
        unit="seconds",
        ours=median(seconds[slower]),
        theirs=median(seconds["copy"]),
        theirs_is="copying the files",
        better="lower",
        details={
            **{f"{way} seconds": round(median(seconds[way]), 3) for way in ways},
            **{f"{way} peak MB": round(peak[way]) for way in ways},
            "imports alone MB": round(imports),
            "repeats": options.repeats,
        },
    )
    show(result, as_json=options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(*sys.argv[2:])
    main()
