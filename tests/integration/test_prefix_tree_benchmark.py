"""The benchmark of the prefix tree: its sides make the same step, and its tiny form runs and reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks.prefix_tree import CURVES, curves, picture, trl_version
from benchmarks.prefix_tree_side import FlatPolicy, grpo, sft
from benchmarks.prefix_tree_work import Setting, Shape, advantages, micro_batch
from pivotrl.config import Optimizer, Parallel, Precision
from pivotrl.policy.policy import MegatronPolicy
from pivotrl.policy.prefix_tree import build_tree

ROOT = Path(__file__).resolve().parents[2]
TINY = Shape(trunk=48, pivots=3, group=4, action=5)
Folders = dict[str, tuple[Path, Any]]


@pytest.mark.parametrize("shape", [Shape(), TINY, Shape(512, 1, 8, 32)])
def test_tokens_are_those_of_the_tree(shape: Shape) -> None:
    sequences, objective = grpo(shape, 49152)
    tree = build_tree(sequences)
    assert (tree.tokens_total, tree.tokens_unique) == (shape.tokens, shape.unique)
    assert float(objective.weights.sum()) * shape.action == pytest.approx(1.0)
    assert sum(advantages(shape.group)) == pytest.approx(0.0, abs=1e-9)
    assert Shape().tokens / Shape().unique == 10.5


def test_tree_and_flat_make_the_same_step(tiny_folders: Folders) -> None:
    """And the flat side shares nothing: it computes the token ratio's number of tokens."""
    reports = []
    for side in (MegatronPolicy, FlatPolicy):
        policy = side.load(
            tiny_folders["llama"][0],
            Parallel(),
            Precision(policy="fp32"),
            Optimizer(1e-3, tokens_per_microbatch=120),
            64,
            10,
            seed=0,
        )
        sequences, objective = grpo(TINY, 128)
        reports.append(policy.train_step(sequences, objective, 1.0))
        reports[-1]["sft_loss"] = policy.train_step(*sft(TINY, 128), 1.0)["loss"]
    tree, flat = reports
    for key in ("loss", "grad_norm", "entropy_sum", "sft_loss"):
        assert tree[key] == pytest.approx(flat[key], rel=1e-4, abs=1e-6), key
    assert flat["tokens_unique"] == TINY.tokens > tree["tokens_unique"]


def test_tiny_form(tiny_folders: Folders) -> None:
    sizes = {"trunk": TINY.trunk, "pivots": TINY.pivots, "group": TINY.group, "action": TINY.action}
    words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
    words += ["--dtype", "fp32", "--sides", "tree,flat", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.prefix_tree", "--model", str(tiny_folders["llama"][0]), *words],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["speedup_vs_flat"] == pytest.approx(result["seconds"]["flat"] / result["seconds"]["tree"])
    assert result["speedup_vs_trl"] is None and result["trl"] == "not asked for"
    assert result["cost_vs_sft_step"] is None
    assert result["tokens"]["ratio"] == round(TINY.tokens / TINY.unique, 2)
    assert result["grad_norm"]["tree"] == pytest.approx(result["grad_norm"]["flat"], rel=1e-4)
    assert all(result["peak_mb"][side] > result["imports_mb"][side] > 100 for side in ("tree", "flat"))


def test_curves_are_measured(tiny_folders: Folders, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.prefix_tree.CURVES", {"pivots": [(p, Shape(24, p, 2, 3)) for p in (1, 2)]})
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    table = curves(Setting(str(tiny_folders["llama"][0]), 128, 120, "fp32", recompute=True), 1)
    assert [row["x"] for row in table["pivots"]] == [1, 2]
    assert all(row["speedup_vs_flat"] > 0 and set(row["seconds"]) == {"tree", "flat"} for row in table["pivots"])
    assert "tokens" in table["pivots"][0] and "<polyline" in picture(table)


def test_without_trl_it_is_said() -> None:
    version, said = trl_version(sys.executable)
    if version is None:
        assert "pip install trl" in said and "--trl-python" in said
    else:
        assert said == f"trl {version}"


def test_trl_pads_its_micro_batches() -> None:
    setting = Setting("x", 10, 8192, "bf16", True)
    assert micro_batch(setting, Shape()) == 2  # 3 would fit and do not divide 32
    assert micro_batch(setting, Shape(trunk=9000)) == 1


def test_the_picture_is_an_svg_file_with_every_curve() -> None:
    table = {
        title: [{"x": x, "speedup_vs_flat": 3.0, "tokens": {"ratio": s.tokens / s.unique}} for x, s in shapes]
        for title, shapes in CURVES.items()
    }
    root = ElementTree.fromstring(picture(table))
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert len(root.findall("{http://www.w3.org/2000/svg}svg")) == len(CURVES)
