"""From groups of rollouts to samples: who takes part, with which advantage and weight. Group ids, never strides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.config import Algorithm
from pivotrl.training.batch import kl_penalties, make_batch, make_samples, minibatches, preference_samples
from tests.unit.toy_policy import batch_of, rollout, state


def samples_of(a: Algorithm, *groups: list[Any]) -> dict[str, Any]:
    batch = make_batch([state([1, 2]) for _ in groups], groups, a)
    return {s.rollout.id: s for s in make_samples(batch.rollouts, range(len(batch.rollouts)), a, 8)}


@settings(max_examples=50)
@given(st.lists(st.sampled_from(["kept", "overlong", "invalid", "unscorable", "nan"]), min_size=2, max_size=12))
def test_filters_never_mix_rollouts_up(kinds: list[str]) -> None:  # field report C7
    a = Algorithm(overlong_filter=True, invalid_action="mask", entropy_bonus=0.1)  # everything unmasked is a sample
    group = []
    for i, kind in enumerate(kinds):
        changes: dict[str, Any] = {"logprobs": (-0.5 - i, float("nan") if kind == "nan" else -0.25)}
        changes |= {"finish": "length"} if kind == "overlong" else {}
        changes |= {"problems": ["unclosed tag"]} if kind == "invalid" else {}
        group.append(rollout("t#1", i, [i % 11, 3], None if kind == "unscorable" else float(i % 2), **changes))
    found = samples_of(a, group)
    assert set(found) == {f"t#1/{i}" for i, kind in enumerate(kinds) if kind == "kept"}
    for name, sample in found.items():
        i = int(name.rpartition("/")[2])
        r = sample.rollout
        assert (r.sequence.token_ids[2:], r.logprobs, r.reward) == ((i % 11, 3), (-0.5 - i, -0.25), float(i % 2))


def test_only_the_generated_tokens_carry_loss() -> None:  # field report C10
    history = [1, 5, 2, 6, 3, 7]  # user, assistant, tool, assistant, tool, and the header of the turn
    batch = make_batch([state(history)], [[rollout("t#3", 0, [8, 9, 4], 1.0)]], Algorithm())
    (scored,) = batch.rollouts
    assert scored.sequence.token_ids == (*history, 8, 9, 4)
    assert scored.sequence.targets == (6, 7, 8)


def test_unscorable_leaves_means_and_denominator() -> None:  # field report C12
    group = [rollout("t#1", i, [i, 3], r) for i, r in enumerate([1.0, None, 0.0, 0.0])]
    found = samples_of(Algorithm(), group)
    assert [round(s.advantage, 4) for s in found.values()] == [1.4142, -0.7071, -0.7071]
    assert {s.weight for s in found.values()} == {1 / 6}


def test_a_broken_log_prob_is_dropped_and_counted() -> None:  # field report B7
    group = [rollout("t#1", i, [i, 3], r) for i, r in enumerate([1.0, 0.0, 0.0])]
    group.append(rollout("t#1", 3, [4, 4, 4], 1.0, logprobs=(-1.0, -1.0, float("nan"))))
    batch = make_batch([state([1])], [group], Algorithm())
    assert [r.id for r in batch.rollouts] == ["t#1/0", "t#1/1", "t#1/2"]
    assert batch.metrics["broken_logprobs"] == 1.0
    assert [round(s.advantage, 4) for s in make_samples(batch.rollouts, range(3), Algorithm(), 8)] == [
        1.4142,
        -0.7071,
        -0.7071,
    ]


def test_log_probs_must_be_one_a_token() -> None:
    with pytest.raises(ValueError, match="t#1/0: 2 tokens but 1 log-probs"):
        make_batch([state([1])], [[rollout("t#1", 0, [1, 2], 1.0, logprobs=(-1.0,))]], Algorithm())


@pytest.mark.parametrize("drop", [False, True])
def test_groups_of_equal_rewards(drop: bool) -> None:  # field report C6
    mixed = [rollout("t#1", i, [i, 3], r) for i, r in enumerate([1.0, 0.0])]
    equal = [rollout("t#2", i, [i, 3, 5, 7], 1.0) for i in range(2)]
    a = Algorithm(drop_uniform_groups=drop, kl_beta=0.1)
    both, alone = samples_of(a, mixed, equal), samples_of(a, mixed)
    if drop:  # as if the group had not been drawn
        assert {k: (s.advantage, s.weight) for k, s in both.items()} == {
            k: (s.advantage, s.weight) for k, s in alone.items()
        }
    else:  # it counts, and its KL term pulls
        assert {s.weight for s in both.values()} == {1 / 12}
        assert len(both) == 4
        assert len(samples_of(Algorithm(), mixed, equal)) == 2  # without that term it is not even computed


def test_an_invalid_action_may_get_a_fixed_advantage() -> None:  # field report O10
    group = [rollout("t#1", i, [i, 3], r) for i, r in enumerate([1.0, 0.0, 0.0])]
    group.append(rollout("t#1", 3, [9, 9], 0.0, problems=["arguments are no JSON"]))
    scored, penalised = (samples_of(Algorithm(invalid_action=kind), group) for kind in ("score", "penalty"))
    assert penalised["t#1/3"].advantage == -5.0
    assert scored["t#1/3"].advantage > -1.0
    for i in range(3):  # the group's mean and deviation are those of the rewards
        assert penalised[f"t#1/{i}"].advantage == scored[f"t#1/{i}"].advantage
    masked = samples_of(Algorithm(invalid_action="mask"), group)
    assert set(masked) == {"t#1/0", "t#1/1", "t#1/2"}
    assert {s.weight for s in masked.values()} == {1 / 6}
    metrics = make_batch([state([1])], [group], Algorithm()).metrics
    assert (metrics["malformed"], metrics["reward"]) == (0.25, 0.25)


def test_a_state_drawn_twice_makes_two_groups() -> None:
    groups = [[rollout("t#1", i, [i, 3], r) for i, r in enumerate(row)] for row in ([1.0, 1.0], [0.0, 0.0])]
    batch = make_batch([state([1])] * 2, groups, Algorithm())
    assert make_samples(batch.rollouts, range(4), Algorithm(), 8) == []  # no group is mixed


def test_groups_are_counted_by_outcome() -> None:
    rewards = ([1, 1], [0, 0], [0, 1], [0.5, 0.5], [None, None], [0, None], [0.5, 1], [1])
    metrics = batch_of(rewards).metrics
    shares = [metrics[f"{kind}_groups"] * len(rewards) for kind in ("right", "wrong", "mixed")]
    assert shares == [2, 2, 2]  # of equal half marks, and unscored, it is none of these


def test_groups_of_uneven_size_need_no_stride() -> None:
    batch = batch_of([[1, 0], [1, 0, 0, 0, 0], [None, 1, 0]])
    order = [5, 0, 2, 6, 1, 3, 4, 8, 7]
    a = Algorithm()
    straight = {s.rollout.id: s for s in make_samples(batch.rollouts, range(9), a, 8)}
    shuffled = {s.rollout.id: s for s in make_samples(batch.rollouts, order, a, 8)}
    assert straight == shuffled
    assert sum(s.advantage for s in straight.values()) == pytest.approx(0.0, abs=1e-9)


@settings(max_examples=50)
@given(st.integers(1, 6), st.integers(0, 5))
def test_minibatches_hold_every_group_once_and_whole(count: int, epoch: int) -> None:
    rollouts = batch_of([[1, 0]] * 5).rollouts
    parts = minibatches(rollouts, count, 7, 3, epoch)
    assert len(parts) == count
    assert sorted(i for part in parts for i in part) == list(range(10))
    groups = [{rollouts[i].group for i in part} for part in parts]
    assert sum(len(g) for g in groups) == 5
    assert parts == minibatches(rollouts, count, 7, 3, epoch)


def test_padding_rollouts_cannot_enter() -> None:  # field report D6
    """Three scored rollouts of four: loss weights and mean reward are those of three."""
    three = [rollout("t#1", i, [i, 3], r) for i, r in enumerate([1.0, 0.0, 0.0])]
    padded = [*three, rollout("t#1", 3, [0, 0, 0, 0], None)]
    a = Algorithm()
    assert samples_of(a, three) == samples_of(a, padded)
    metrics = [make_batch([state([1])], [g], a).metrics["reward"] for g in (three, padded)]
    assert metrics[0] == metrics[1]


def test_kl_in_the_reward_is_of_the_policy_that_sampled() -> None:
    batch = batch_of([[1, 0]])
    reference = [torch.tensor(r.logprobs) - 0.5 for r in batch.rollouts]
    lengths = [len(r.logprobs) for r in batch.rollouts]
    assert kl_penalties(batch.rollouts, reference, 0.1, "k1") == pytest.approx([0.05 * n for n in lengths])


def test_dpo_takes_pairs_of_a_group_without_masked_ones() -> None:
    a = Algorithm(loss="dpo", invalid_action="mask")
    group = [rollout("t#1", i, [i, 3], r) for i, r in enumerate([1.0, 0.0, 0.0])]
    group[2] = rollout("t#1", 2, [2, 3], 0.0, problems=["x"])
    equal = [rollout("t#2", i, [i, 3], 0.0) for i in range(2)]
    batch = make_batch([state([1]), state([2])], [group, equal], a)
    samples, pairs = preference_samples(batch.rollouts, range(5))
    assert [s.rollout.id for s in samples] == ["t#1/0", "t#1/1"]
    assert [(p.winner, p.loser, p.weight) for p in pairs] == [(0, 1, 1.0)]
