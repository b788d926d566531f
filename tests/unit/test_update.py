"""The update of a step: forwards, mini-batches, KL to pi_0, DPO, and what happens to steps that are no number."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pivotrl.config import Config
from pivotrl.training.batch import Batch
from pivotrl.training.gate import MismatchError
from pivotrl.training.nonfinite import NonFiniteError, NonFiniteSteps, suspects
from pivotrl.training.update import needs_reference, optimizer_steps, update
from tests.unit.toy_policy import ToyPolicy, batch_of

REWARDS = [[1, 0, 0, 1], [0.5, 0.5, 0.5, 0.5], [0, 0, 0, 1], [1, 1, 0, 0.25]]


def config(**changes: Any) -> Config:
    cfg = Config()
    cfg.sampling.max_new_tokens = 8
    for key, value in changes.items():
        setattr(cfg.algorithm, key, value)
    return cfg


def run(
    folder: Path, policy: ToyPolicy | None = None, batch: Batch | None = None, step: int = 0, **changes: Any
) -> Any:
    cfg, policy = config(**changes), policy or ToyPolicy()
    batch = batch or batch_of(REWARDS, cfg.algorithm)
    found, changed = update(policy, batch, cfg, step, NonFiniteSteps(folder, 3))  # type: ignore[arg-type]
    return found, changed, policy


def test_one_optimiser_step_needs_no_second_forward(tmp_path: Path) -> None:
    found, changed, policy = run(tmp_path)
    assert policy.calls == {"logprobs": 0, "train_step": 1}
    assert changed
    assert (found["optimizer_steps"], found["nonfinite"], found["skipped"]) == (1.0, 0.0, 0.0)
    assert (found["clip_low_fraction"], found["clip_high_fraction"]) == (0.0, 0.0)
    assert "kl" not in found and "update_kl" not in found


def test_several_optimiser_steps_use_old_log_probs(tmp_path: Path) -> None:
    found, _, policy = run(tmp_path, ToyPolicy(rate=30.0), epochs=3, minibatches=2, clip_low=0.01, clip_high=0.01)
    assert policy.calls == {"logprobs": 1, "train_step": 6}
    assert optimizer_steps(config(epochs=3, minibatches=2).algorithm) == 6
    assert found["update_kl"] > 0
    assert found["clip_low_fraction"] + found["clip_high_fraction"] > 0
    assert found["seconds_old"] > 0


def test_the_first_of_several_steps_has_ratio_one(tmp_path: Path) -> None:  # field report B8
    once, _, one = run(tmp_path)
    twice, _, two = run(tmp_path, ToyPolicy(rate=0.0), epochs=2)
    assert twice["loss"] == pytest.approx(once["loss"], abs=1e-6)
    assert twice["update_kl"] == pytest.approx(0.0, abs=1e-7)
    for x, y in zip(one.parameters(), two.parameters(), strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=0, atol=1e-6)


def test_reference_is_asked_for_only_where_it_is_used(tmp_path: Path) -> None:
    assert not needs_reference(config().algorithm)
    for changes in ({"kl_beta": 0.1}, {"loss": "dpo"}, {"reference_every": 2}):
        assert needs_reference(config(**changes).algorithm)
    measured = [run(tmp_path, step=s, reference_every=2)[0] for s in range(3)]
    assert ["kl" in m for m in measured] == [True, False, True]
    assert measured[0]["kl"] == pytest.approx(0.0, abs=1e-7)  # nothing was trained yet


def test_kl_in_loss_and_in_reward(tmp_path: Path) -> None:
    moved = ToyPolicy()
    with torch.no_grad():
        moved.table += 0.5 * torch.randn(moved.table.shape, generator=torch.Generator().manual_seed(1))
    in_loss, _, policy = run(tmp_path, moved, kl_beta=0.1)
    assert policy.calls == {"logprobs": 1, "train_step": 1}
    assert in_loss["kl"] > 0
    assert in_loss["kl_term"] == pytest.approx(in_loss["kl"])
    in_reward, _, _ = run(tmp_path, ToyPolicy(), kl_beta=0.1, kl_in="reward", kl_estimator="k1")
    assert "kl_term" not in in_reward
    assert "kl_reward" in in_reward


def test_policy_gradient_and_dpo_raise_accepted_actions(tmp_path: Path) -> None:
    for changes in ({}, {"loss": "cispo"}, {"ratio": "geometric", "aggregation": "sequence_mean"}, {"loss": "dpo"}):
        policy, cfg = ToyPolicy(rate=0.5), config(**changes)
        batch = batch_of([[1, 0, 0, 1], [0, 1, 0, 0]], cfg.algorithm)

        def gap(policy: ToyPolicy = policy, batch: Batch = batch) -> float:
            values = policy.logprobs([r.sequence for r in batch.rollouts], 1.0)
            signed = [v.mean() * (1 if r.reward else -1) for v, r in zip(values, batch.rollouts, strict=True)]
            return float(sum(signed))

        before = gap()
        for step in range(5):
            found = run(tmp_path, policy, batch, step, **changes)[0]
        assert gap() > before + 0.1, changes
        if changes == {"loss": "dpo"}:
            assert found["dpo_pairs"] == 7
            assert found["dpo_accuracy"] > 0.5
            assert found["mismatch_abs"] > 0


@pytest.mark.parametrize("loss", ["clip", "dpo"])
def test_the_running_gate_stops_and_shows_the_worst_tokens(tmp_path: Path, loss: str) -> None:
    cfg = config(loss=loss)
    good = batch_of(REWARDS, cfg.algorithm)
    spoiled = good.rollouts[0]
    far = replace(spoiled, logprobs=(-99.0, *spoiled.logprobs[1:]))
    batch = Batch([far, *good.rollouts[1:]], good.metrics)
    steps = NonFiniteSteps(tmp_path, 3)
    update(ToyPolicy(), batch, cfg, 0, steps, mismatch_limit=1e3)  # type: ignore[arg-type]
    with pytest.raises(MismatchError, match=rf"at step 4(.|\n)*tokens:\n  rollout {far.id}, token 0: .* engine -99"):
        update(ToyPolicy(), batch, cfg, 4, steps, mismatch_limit=0.5)  # type: ignore[arg-type]


def test_no_signal_is_a_named_skip(tmp_path: Path) -> None:  # field report C11
    found, changed, policy = run(tmp_path, batch=batch_of([[1, 1], [0, 0]]))
    assert (found["skipped"], found["optimizer_steps"], found["nonfinite"], changed) == (1.0, 0.0, 0.0, False)
    assert policy.calls["train_step"] == 0
    found, changed, _ = run(tmp_path, batch=batch_of([[None, None]]))
    assert (found["skipped"], changed) == (1.0, False)


def test_token_weighted_reduction_over_minibatches(tmp_path: Path) -> None:
    """Six tokens of one mini-batch and many of another weigh by their number."""
    whole, _, _ = run(tmp_path, ToyPolicy(rate=0.0))
    parts, _, _ = run(tmp_path, ToyPolicy(rate=0.0), minibatches=3)
    for name in ("entropy", "mismatch_abs", "mismatch_k3", "mismatch_max", "importance", "importance_ess"):
        assert parts[name] == pytest.approx(whole[name], rel=1e-5), name
    assert parts["target_tokens"] == whole["target_tokens"]


def test_non_finite_steps_are_skipped_counted_and_end_the_run(tmp_path: Path) -> None:
    policy, cfg = ToyPolicy(), config()
    policy.breaks = {1, 2, 3}
    steps = NonFiniteSteps(tmp_path, 3)
    batch = batch_of(REWARDS)
    _, changed = update(policy, batch, cfg, 0, steps)  # type: ignore[arg-type]
    assert changed
    weights = policy.table.detach().clone()
    for step in (1, 2):
        found, changed = update(policy, batch, cfg, step, steps)  # type: ignore[arg-type]
        assert (changed, found["nonfinite"], found["skipped"]) == (False, 1.0, 1.0)
    assert torch.equal(policy.table, weights)
    with pytest.raises(NonFiniteError, match=r"at step 3 .* 3 steps were skipped.*none is non-finite by itself.*t#0/0"):
        update(policy, batch, cfg, 3, steps)  # type: ignore[arg-type]
    rows = [json.loads(line) for line in (tmp_path / "nonfinite.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[0]["samples"] == [r.id for r in batch.rollouts if r.group != 1]
    # a resumed run goes on counting, and forgets what it does again
    assert NonFiniteSteps(tmp_path, 3, start_step=3).count == 2
    assert NonFiniteSteps(tmp_path, 3).count == 0


def test_the_offending_samples_are_named(tmp_path: Path) -> None:
    policy, batch = ToyPolicy(), batch_of([[1, 0], [0, 1]])
    bad = batch.rollouts[3]
    with torch.no_grad():  # one token at one depth overflows
        policy.depth[len(bad.sequence.token_ids) - 2] = float("nan")
    deepest = [r.id for r in batch.rollouts if len(r.sequence.token_ids) >= len(bad.sequence.token_ids)]
    with pytest.raises(NonFiniteError) as caught:
        update(policy, batch, config(), 0, NonFiniteSteps(tmp_path, 1))  # type: ignore[arg-type]
    assert f"samples with non-finite values: {', '.join(deepest)}." in str(caught.value)
    assert len(deepest) < len(batch.rollouts)
    assert suspects(["a", "b"], [[torch.zeros(1), torch.tensor([math.inf])]]) == ["b"]


def test_theory_is_logged(tmp_path: Path) -> None:
    found, _, _ = run(tmp_path, kl_beta=0.5)
    assert found["theory_accepted_mass"] == pytest.approx((0.5 + 0 + 0.25 + 0.5) / 4)
    assert found["theory_signal_std"] == pytest.approx((0.5 + 0 + math.sqrt(3) / 4 + 0.4436) / 4, abs=1e-3)
    assert 0 <= found["theory_accepted_mass_start"] <= 1
    assert found["theory_accepted_mass_optimal"] >= found["theory_accepted_mass_start"]
