"""Presets of conf/algorithm, and combinations of options that cannot be."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from pivotrl.algorithm_checks import CHOICES
from pivotrl.config import Algorithm
from pivotrl.configuration import load_config
from pivotrl.training.advantages import RULES
from pivotrl.training.objective import AGGREGATIONS
from pivotrl.validation import conflicts

PRESETS = sorted(p.stem for p in (Path(__file__).parents[2] / "conf" / "algorithm").glob("*.yaml"))


def found(overrides: list[str], stage: str = "run") -> list[str]:
    return conflicts(load_config(["domain=outfitters", *overrides]), stage, world_size=1, cuda=False)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_possible(name: str) -> None:
    assert found([f"algorithm={name}"]) == []


def test_presets_are_the_named_algorithms() -> None:
    assert {"grpo", "grpo_kl", "grpo_nvidia", "dr_grpo", "dapo", "gspo", "cispo", "dpo"} <= set(PRESETS)


def test_choices_are_what_the_code_knows() -> None:
    assert set(CHOICES["algorithm.advantage"]) == set(RULES)
    assert set(CHOICES["algorithm.aggregation"]) == set(AGGREGATIONS)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["algorithm.loss=ppo"], "not one of clip, cispo, dpo"),
        (["algorithm.clip_low=1"], "clip_low=1.0 must be below 1"),
        (["algorithm=cispo", "algorithm.clip_low=1.5"], "clip_low=1.5"),
        (["algorithm.dual_clip=1"], "dual_clip=1.0 must be above 1"),
        (["algorithm=cispo", "algorithm.dual_clip=3"], "loss=cispo bounds the weight"),
        (["algorithm=cispo", "algorithm.ratio=geometric"], "ratio=geometric: loss=cispo"),
        (["algorithm.ratio=sequence"], "aggregation=token_mean: ratio=sequence"),
        (["algorithm.kl_in=reward"], "does nothing with algorithm.kl_beta=0"),
        (["algorithm.kl_in=reward", "algorithm.kl_beta=0.1", "algorithm.kl_estimator=unbiased"], "a reward has none"),
        (["algorithm.importance_correction=masked", "algorithm.importance_cap=0.5"], "importance_cap=0.5 must be >= 1"),
        (["algorithm.importance_correction=truncated", "algorithm.importance_floor=2"], "must be <= 1"),
        (["algorithm.importance_floor=0.1"], "does nothing with importance_correction=none"),
        (["algorithm.importance_sequence_low=1.1"], "must lie between"),
        (["algorithm.sequence_mismatch_limit=1"], "must be above 1"),
        (["algorithm=dpo", "algorithm.kl_beta=0.1"], "kl_beta=0.1 has no place in loss=dpo"),
        (["algorithm=dpo", "algorithm.dual_clip=3"], "dual_clip=3.0 has no place in loss=dpo (use null)"),
        (["algorithm=dpo", "algorithm.invalid_action=penalty"], "loss=dpo has none"),
        (["algorithm.invalid_action=penalty", "algorithm.invalid_advantage=5"], "must be negative"),
        (["algorithm.minibatches=16"], "minibatches=16 exceeds algorithm.pivots_per_step"),
        (["algorithm.epochs=0"], "epochs=0 must be positive"),
        (["algorithm.entropy_bonus=-0.1"], "entropy_bonus=-0.1 must not be negative"),
        (["algorithm.optimizer.max_nonfinite_steps=0"], "max_nonfinite_steps=0 must be positive"),
        (["sampling.top_p=0.9"], "training needs top_p=1"),
        (["sampling.top_k=20"], "training needs top_p=1"),
    ],
)
def test_impossible_combinations(overrides: list[str], part: str) -> None:
    told = found(overrides)
    assert any(part in text for text in told), told


def test_whole_episodes_are_sampled_alike() -> None:
    assert any("training needs top_p=1" in text for text in found(["sampling.top_p=0.9"], "e2e"))
    assert any("needs generation.server" in text for text in found(["algorithm.one_step_off=true"], "e2e"))


def test_what_does_not_train_may_cut_the_distribution() -> None:
    assert found(["sampling.top_p=0.9"], "evaluate") == []


def test_the_defaults_are_the_paper_s() -> None:
    a: Any = Algorithm()
    preset = load_config(["algorithm=grpo"]).algorithm
    for name in CHOICES:
        field = name.partition(".")[2]
        assert getattr(a, field) == getattr(preset, field), field


def test_the_table_names_every_key_and_only_keys() -> None:
    text = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text(encoding="utf-8")
    table = text[text.index("## Paper to flag") : text.index("Keys without a section")]
    fields = {f.name for f in dataclasses.fields(Algorithm)}
    cells = [line.rstrip(" |").rpartition(" | ")[2] for line in table.splitlines() if line.startswith("| ")][1:]
    named = {
        word.partition("=")[0] for cell in cells for span in re.findall(r"`([^`]+)`", cell) for word in span.split()
    }
    other = {"optimizer.*", "profile.rollouts_per_turn", "select.lambda_diff", "sampling.max_new_tokens"}
    assert named - other <= fields
    assert fields - named <= {"steps", "reference_every", "allow_foreign_profile", "optimizer"}
