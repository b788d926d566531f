"""Reductions, model FLOPs and the live theory, each on numbers that can be checked by hand."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from pivotrl.config import Precision
from pivotrl.models.dims import Dims
from pivotrl.models.registry import family_for
from pivotrl.policy.prefix_tree import TokenSequence, build_tree
from pivotrl.profiling import theory
from pivotrl.training.batch import Scored
from pivotrl.training.metrics import StepSums
from pivotrl.training.theory_metrics import group_theory, reference_theory
from pivotrl.training.throughput import Work, active_parameters, forward_flops, memory, peak_flops, unique_tokens
from tests.true_configs import NEMOTRON_3_SUPER

BF16 = Precision(policy="bf16")


def report(tokens: int, **changes: float) -> dict[str, float]:
    base = {"target_tokens": tokens, "tokens_total": 10.0 * tokens, "tokens_unique": 4.0 * tokens}
    return {**base, "loss": 1.0, "grad_norm": 2.0, "learning_rate": 0.1, "skipped": 0.0, **changes}


def test_means_weigh_tokens_and_maxima_are_maxima() -> None:
    sums = StepSums()
    sums.add(report(1, entropy_sum=4.0, mismatch_max=0.5, learning_rate=0.2, loss=3.0))
    sums.add(report(3, entropy_sum=0.0, mismatch_max=0.1))
    found = sums.finish()
    assert found["entropy"] == 1.0  # not (4 + 0) / 2
    assert (found["mismatch_max"], found["loss"], found["learning_rate"]) == (0.5, 2.0, 0.1)
    assert (found["tokens_total"], found["tokens_unique"], found["tokens_saved"]) == (40, 16, 24)
    assert not any(name.endswith("_sum") for name in found)


def test_effective_sample_size() -> None:
    for weights, ess in (([1.0, 1.0, 1.0, 1.0], 1.0), ([4.0, 0.0, 0.0, 0.0], 0.25)):
        sums = StepSums()
        sums.add(report(4, importance_sum=sum(weights), importance_square_sum=sum(w * w for w in weights)))
        found = sums.finish()
        assert found["importance_ess"] == pytest.approx(ess)
        assert "importance_square" not in found


def test_a_number_that_is_none_shows() -> None:
    sums = StepSums()
    sums.add(report(1, mismatch_max=0.5))
    sums.add(report(1, mismatch_max=math.nan, skipped=1.0))
    found = sums.finish()
    assert math.isnan(found["mismatch_max"])
    assert (found["optimizer_steps"], found["nonfinite"], found["skipped"]) == (1, 1, 0)
    assert StepSums().finish() == {"optimizer_steps": 0.0, "nonfinite": 0.0, "skipped": 1.0}


def test_active_parameters_of_known_models() -> None:
    """Qwen3-30B-A3B is named for 3.3 active billions, of which 0.6 are embedding and head."""
    moe = Dims(
        layers=48,
        hidden=2048,
        vocab=151936,
        heads=32,
        kv_heads=4,
        head_dim=128,
        ffn=6144,
        moe_ffn=768,
        experts=128,
        kinds=("moe",) * 48,
    )
    assert active_parameters(moe, 8) + 2 * moe.vocab * moe.hidden == pytest.approx(3.35e9, rel=0.01)
    dense = dataclasses.replace(moe, kinds=("dense",) * 48)
    assert active_parameters(moe, 8) - active_parameters(dense) == 48 * 2048 * 128  # 8 x 768 = 6144, and a router
    hybrid = family_for(NEMOTRON_3_SUPER).dims(NEMOTRON_3_SUPER)  # 12B active, one of them embedding and head
    assert active_parameters(hybrid, 22) + 2 * hybrid.vocab * hybrid.hidden == pytest.approx(12.7e9, rel=0.02)
    assert forward_flops(dense, 0, 10, 0) == 20 * active_parameters(dense)
    assert forward_flops(dense, 0, 0, 3) == 6 * moe.hidden * moe.vocab


def test_forward_only_counts_a_third_of_training() -> None:
    dims = Dims(layers=2, hidden=8, vocab=16, heads=2, kv_heads=1, head_dim=4, ffn=16)
    sequences = [TokenSequence.of([1, 2, 3], [4, 5]), TokenSequence.of([1, 2, 3], [6])]
    assert unique_tokens(sequences) == 6 == build_tree(sequences).tokens_unique
    forward, train = Work(dims, 0), Work(dims, 0)
    forward.forward(sequences)
    train.train(6, 3)
    assert train.flops == 3 * forward.flops > 0


def test_mfu_is_absent_on_unknown_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    work = Work(Dims(2, 8, 16, 2, 1, 4, 16), 0)
    work.flops = 989e12
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert work.mfu(1.0, BF16) == {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name, world, wanted in (("NVIDIA H200", "2", {"mfu": 0.25}), ("Some GPU", "2", {})):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        monkeypatch.setenv("WORLD_SIZE", world)
        assert work.mfu(2.0, BF16) == wanted


@pytest.mark.parametrize(
    ("device", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", BF16, 989.0),
        ("NVIDIA H100 PCIe", BF16, 756.0),
        ("NVIDIA H200", Precision(policy="bf16", fp8="blockwise"), 1979.0),
        ("NVIDIA H20", BF16, 148.0),
        ("NVIDIA GB200", BF16, 2500.0),
        ("NVIDIA A100-SXM4-80GB", Precision(policy="bf16", fp8="delayed"), None),
        ("NVIDIA H100 80GB HBM3", Precision(policy="fp32"), None),
        ("", BF16, None),
    ],
)
def test_peaks(device: str, precision: Precision, tera: float | None) -> None:
    assert peak_flops(device, precision) == (None if tera is None else tera * 1e12)


def test_memory_is_of_this_process() -> None:
    assert 0.01 < memory()["memory_peak_gib"] < 1000


def scored(group: int, action: int, reward: float, logprob: float) -> Scored:
    sequence = TokenSequence.of([1, 2], [action, 3])
    return Scored(f"t{group}/{action}", group, sequence, (logprob / 2, logprob / 2), reward)


def test_ratios_on_the_kl_path_are_kept_and_mass_is_found() -> None:
    """pi = the optimum of Theorem 3.3: correlations are 1, and importance weights find pi_0(M) from pi's samples."""
    start, rewards, beta = [0.4, 0.2, 0.1, 0.15, 0.1, 0.05], [1.0, 1.0, 1.0, 0.0, 0.0, 0.0], 0.7
    trained = theory.kl_path(start, rewards, beta)
    counts = [round(1000 * p) for p in trained]  # as many samples of each action as pi gives it
    rollouts = [
        scored(0, action, rewards[action], math.log(trained[action]))
        for action in range(6)
        for _ in range(counts[action])
    ]
    reference = [math.log(start[r.sequence.token_ids[2]]) for r in rollouts]
    found = reference_theory(rollouts, reference, beta)
    assert found["theory_ratio_accepted"] == pytest.approx(1.0)
    assert found["theory_ratio_other"] == pytest.approx(1.0)
    assert found["theory_accepted_mass_start"] == pytest.approx(0.7, abs=0.01)
    own = group_theory(rollouts)
    assert own["theory_accepted_mass"] == pytest.approx(found["theory_accepted_mass_optimal"], abs=0.01)


def test_too_few_distinct_actions_say_nothing() -> None:
    rollouts = [scored(0, 4, 1.0, -1.0)] * 8
    assert "theory_ratio_accepted" not in reference_theory(rollouts, [-1.0] * 8, 0.0)
    assert group_theory([]) == {}
    assert reference_theory([], [], 0.1) == {}


def test_expected_share_of_mixed_groups() -> None:
    rollouts = [scored(0, i, float(i == 0), -1.0) for i in range(4)]
    assert group_theory(rollouts)["theory_mixed_expected"] == pytest.approx(theory.informative_share(0.25, 4))
