"""One training step on all pivots of a trajectory: prefix tree against flat packing against TRL's GRPOTrainer.

Same weights, sequences, advantages, optimiser and micro-batch budget; each side in a process of its own (peak memory),
steps interleaved (time). One SFT step on the trajectory is measured too. TRL is optional (`pip install trl` into any
environment, named with --trl-python); without it `speedup_vs_trl` is null and `trl` says why. `--curves FILE.svg` draws
how tree and flat scale with group size, trunk length and number of pivots.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks.common import environment, median, parser
from benchmarks.prefix_tree_work import MARK, Setting, Shape, command

ROOT = Path(__file__).resolve().parents[1]
CURVES = {  # title -> (x, shape): all around one shape that is no toy, and small, for flat costs its token ratio
    "actions a pivot": [(g, Shape(192, 4, g, 16)) for g in (2, 4, 8, 12)],
    "tokens of the trajectory": [(t, Shape(t, 4, 8, 16)) for t in (96, 192, 384)],
    "pivots": [(p, Shape(192, p, 8, 16)) for p in (1, 2, 4, 6)],
}


class Side:
    """A process that makes steps on request."""

    def __init__(self, words: list[str]) -> None:
        self.words = words
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the process)
        self.process = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        self.ready = self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(MARK):
                answer: dict[str, Any] = json.loads(line.removeprefix(MARK))
                return answer
        self.process.wait()
        self.errors.seek(0)
        raise RuntimeError(f"{self.words} ended:\n{self.errors.read()[-4000:]}")

    def step(self, shape: Shape) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(asdict(shape)) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=120)


def trl_version(python: str) -> tuple[str | None, str]:
    """(version, what to report) of TRL under an interpreter."""
    probe = "import importlib.metadata as m; print(m.version('trl'))"
    done = subprocess.run([python, "-c", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        return None, f"absent: {python} has no trl; pip install trl into an environment and name it with --trl-python"
    return done.stdout.strip(), f"trl {done.stdout.strip()}"


def start(setting: Setting, shape: Shape, names: list[str], trl_python: str) -> dict[str, Side]:
    sides = {}
    for name in names:
        python, module = (
            (trl_python, "benchmarks.prefix_tree_trl")
            if name == "trl"
            else (sys.executable, "benchmarks.prefix_tree_side")
        )
        sides[name] = Side([python, "-m", module, *command(name, setting, shape)])
    return sides


def compare(sides: dict[str, Side], shape: Shape, repeats: int) -> dict[str, Any]:
    """Interleaved steps of every side: medians, and what shows that they did the same."""
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(repeats):
        for name, side in sides.items():
            rows[name].append(side.step(shape))
            print(f"  {name}: {rows[name][-1]}", file=sys.stderr, flush=True)
    seconds = {name: median([r["seconds"] for r in mine]) for name, mine in rows.items()}

    def over_tree(name: str) -> float | None:
        return seconds[name] / seconds["tree"] if name in seconds else None

    return {
        "speedup_vs_flat": over_tree("flat"),
        "speedup_vs_trl": over_tree("trl"),
        "cost_vs_sft_step": seconds["tree"] / seconds["sft"] if "sft" in seconds else None,
        "seconds": seconds,
        "cpu_seconds": {name: median([r["cpu"] for r in mine]) for name, mine in rows.items()},
        "peak_mb": {name: mine[-1]["peak_mb"] for name, mine in rows.items()},
        "imports_mb": {name: side.ready["imports_mb"] for name, side in sides.items()},
        "grad_norm": {name: mine[0]["grad_norm"] for name, mine in rows.items()},
        "tokens": {"total": shape.tokens, "unique": shape.unique, "ratio": round(shape.tokens / shape.unique, 2)},
    }


def curves(setting: Setting, repeats: int) -> dict[str, list[dict[str, Any]]]:
    """Tree and flat packing over each of CURVES."""
    sides = start(setting, Shape(), ["tree", "flat"], sys.executable)
    compare(sides, Shape(64, 2, 2, 8), 1)  # warm-up
    shapes = {shape for row in CURVES.values() for _, shape in row}  # the curves cross in one
    found = {shape: compare(sides, shape, repeats) for shape in sorted(shapes, key=lambda s: s.tokens)}
    table = {title: [{"x": x, **found[shape]} for x, shape in row] for title, row in CURVES.items()}
    for side in sides.values():
        side.close()
    return table


def picture(table: dict[str, list[dict[str, Any]]]) -> str:
    """Charts side by side, as one SVG file: measured speed-up over flat packing, and the token ratio that bounds it."""
    from pivotrl.tracking.charts import HEIGHT, WIDTH, Series, line_chart

    charts = ""
    for i, (title, rows) in enumerate(table.items()):
        measured = [(row["x"], row["speedup_vs_flat"]) for row in rows]
        bound = [(row["x"], row["tokens"]["ratio"]) for row in rows]
        lines = [Series("measured", measured, "#3b6fd4"), Series("token ratio", bound, "#aab1bc")]
        chart = line_chart(lines, title, "times faster than flat")
        charts += chart.replace("<svg ", f'<svg x="{i * WIDTH}" y="0" width="{WIDTH}" height="{HEIGHT}" ', 1)
    width = len(table) * WIDTH
    head = f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" width="{width}" height="{HEIGHT}">'
    return f'{head}<rect width="{width}" height="{HEIGHT}" fill="#fff"/>{charts}</svg>\n'


def options_of() -> argparse.Namespace:
    made = parser(__doc__)
    made.set_defaults(repeats=1)
    made.add_argument("--model", default="builtin:smollm2-135m")
    for name, value in asdict(Shape()).items():
        made.add_argument(f"--{name}", type=int, default=value, help=f"default {value}")
    made.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    made.add_argument("--tokens-per-microbatch", type=int, default=8192, help="of every side (default 8192)")
    made.add_argument("--no-recompute", action="store_true", help="keep all activations (every side)")
    made.add_argument("--sides", default="tree,flat,sft,trl", help="which to run (default tree,flat,sft,trl)")
    made.add_argument("--trl-python", default=sys.executable, help="interpreter that has trl")
    made.add_argument("--curves", type=Path, help="draw scaling curves to this SVG file instead")
    return made.parse_args()


def main() -> None:
    options = options_of()
    from pivotrl.models.builtin import PREFIX, resolve_model

    # a folder needs no tokenizer here (but for TRL)
    folder = resolve_model(options.model) if options.model.startswith(PREFIX) else Path(options.model)
    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    setting = Setting(
        str(folder), vocabulary, options.tokens_per_microbatch, options.dtype, recompute=not options.no_recompute
    )
    result: dict[str, Any] = {"benchmark": "prefix_tree", "model": options.model, **asdict(setting)}
    if options.curves:
        result["curves"] = curves(setting, options.repeats)
        options.curves.write_text(picture(result["curves"]), encoding="utf-8")
    else:
        shape = Shape(options.trunk, options.pivots, options.group, options.action)
        names = options.sides.split(",")
        version, result["trl"] = trl_version(options.trl_python) if "trl" in names else (None, "not asked for")
        sides = start(setting, shape, [n for n in names if n != "trl" or version], options.trl_python)
        for side in sides.values():  # lazy initialisation and optimiser state, not timed
            side.step(replace(shape, trunk=shape.pivots, group=2, action=1))
        result |= {"shape": asdict(shape), **compare(sides, shape, options.repeats)}
        for side in sides.values():
            side.close()
    result |= environment()
    if options.json:
        print(json.dumps(result), flush=True)
        return
    for name, value in result.items():
        print(f"  {name}: {value}")


if __name__ == "__main__":
    main()
