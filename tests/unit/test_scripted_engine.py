"""Scripted and replay engines: every engine's contract, and that breaches would be seen (A1, A2, A9, A12, B7)."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Sequence

import pytest

from pivotrl.errors import UserError
from pivotrl.generation.engine import Completion, Engine, EngineStateError, NonFiniteLogprobs, RefitError, Sampling
from pivotrl.generation.requests import check_lengths, check_token_ids, first_seed, sample_seed
from pivotrl.generation.scripted import ReplayEngine, ScriptedEngine
from pivotrl.rollouts import Rollout
from pivotrl.trajectories.schema import Action
from pivotrl.verifiers.base import Verdict

SAMPLING = Sampling(max_new_tokens=4)
W1, W2 = {"a": [1.0, 2.0], "b": 3.0}, {"a": [1.0, 2.5], "b": 3.0}


def script(prompt: Sequence[int], k: int, seed: int) -> list[int]:
    return [prompt[-1] + k, seed, 9, 7, 5]


def engine() -> ScriptedEngine:
    return ScriptedEngine(script, W1, stop_token_ids=[9])


def logprobs(e: Engine) -> tuple[float, ...]:
    return e.generate([[1, 2]], SAMPLING, 1, [0])[0][0].logprobs


def test_completions_follow_the_script_and_stop() -> None:
    groups = engine().generate([[1, 2], [3]], SAMPLING, 2, [10, 11])
    assert [[c.token_ids for c in group] for group in groups] == [[(2, 10, 9), (3, 10, 9)], [(3, 11, 9), (4, 11, 9)]]
    assert {c.finish_reason for group in groups for c in group} == {"stop"}
    cut = ScriptedEngine(script).generate([[1]], SAMPLING, 1, [0])[0][0]
    assert (cut.token_ids, cut.finish_reason) == ((1, 0, 9, 7), "length")
    assert all(len(c.logprobs) == len(c.token_ids) and max(c.logprobs) < 0 for group in groups for c in group)


def test_prefix_is_cached_until_a_refit_and_new_weights_are_served() -> None:
    e = engine()
    old = logprobs(e)
    assert e.generate([[1, 2]], SAMPLING, 1, [0])[0][0].cached_prompt_tokens == 2
    e.refit(W2.items(), 1)
    fresh = e.generate([[1, 2]], SAMPLING, 1, [0])[0][0]
    assert (fresh.cached_prompt_tokens, fresh.weight_version, e.cache_resets) == (0, 1, 1)
    assert fresh.logprobs == logprobs(ScriptedEngine(script, W2, [9])) != old
    e.refit(W1.items(), 2)
    assert logprobs(e) == old


def test_a_forgotten_cache_reset_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    e = engine()
    old = logprobs(e)
    monkeypatch.setattr(e, "_reset_prefix_cache", lambda: None)
    e.refit(W2.items(), 1)
    assert logprobs(e) == old != logprobs(ScriptedEngine(script, W2, [9]))


def test_sleep_refit_wake_serves_the_refit_not_a_backup() -> None:
    for keep in (True, False):
        e = engine()
        e.sleep(discard_weights=not keep)
        e.refit(W2.items(), 1)
        e.wake()
        assert e.weights == W2 and logprobs(e) == logprobs(ScriptedEngine(script, W2, [9]))


@pytest.mark.parametrize(
    ("sent", "named"),
    [
        ({"a": [1.0, 2.0]}, "b"),
        ({**W1, "c": 1.0}, "c"),
        ({"a": [1.0], "b": 3.0}, r"a.*\(1,\).*\(2,\)"),
        ({"a": [1.0, math.nan], "b": 3.0}, "a.*NaN"),
        ({"a": [1.0, math.inf], "b": 3.0}, "a.*NaN"),
    ],
)
def test_bad_refit_names_the_weight_and_stops_generation(sent: dict[str, object], named: str) -> None:
    e = engine()
    with pytest.raises(RefitError, match=named):
        e.refit(sent.items(), 1)
    with pytest.raises(EngineStateError, match="refit"):
        logprobs(e)
    e.refit(W1.items(), 2)
    assert e.weight_version == 2 and logprobs(e) == logprobs(engine())


def rollout(turn: str, index: int, prompt_tokens: int = 2) -> Rollout:
    completion = Completion((index, 9), (-0.5, -0.25), "stop", 3)
    return Rollout(turn, index, prompt_tokens, completion, Action(), Verdict(1.0, "ok"))


def test_replay_gives_the_recorded_completions_in_order() -> None:
    e = ReplayEngine([rollout("t", k) for k in range(4)], {"t": [5, 6]})
    assert [c.token_ids[0] for c in e.generate([[5, 6]], SAMPLING, 3, [0])[0]] == [0, 1, 2]
    assert e.generate([[5, 6]], SAMPLING, 1, [0])[0][0] == rollout("t", 3).completion
    with pytest.raises(UserError, match=r"prompt 0 \(t\) needs 1 completions, 0 of 4"):
        e.generate([[5, 6]], SAMPLING, 1, [0])
    with pytest.raises(UserError, match=r"prompt 0 .no recorded turn"):
        e.generate([[1]], SAMPLING, 1, [0])


def test_replay_refuses_rollouts_of_other_turns_or_another_rendering() -> None:
    with pytest.raises(UserError, match="'u' has no prompt"):
        ReplayEngine([rollout("u", 0)], {"t": [5, 6]})
    with pytest.raises(UserError, match="recorded with 3 prompt tokens but renders to 2"):
        ReplayEngine([rollout("t", 0, prompt_tokens=3)], {"t": [5, 6]})


def test_requests_that_cannot_be_meant_are_refused() -> None:
    for prompts, n, seeds in (([[1]], 1, [1, 2]), ([[1]], 0, [1]), ([[1], []], 1, [1, 2])):
        with pytest.raises(ValueError, match="generate"):
            engine().generate(prompts, SAMPLING, n, seeds)


def test_lengths_are_of_prompt_and_completion_together() -> None:
    check_lengths([[0] * 80], 20, 100)
    with pytest.raises(UserError, match=r"prompt 1 has 90 tokens; .*max_new_tokens=20 .*context_length=100 \(1 of 2"):
        check_lengths([[0], [0] * 90], 20, 100)
    with pytest.raises(UserError, match="prompt 1 holds token id -1"):
        check_token_ids([[0], [3, -1]], 4)


def test_sample_seeds_do_not_overlap_between_neighbouring_prompts() -> None:
    seeds = [sample_seed(seed, k) for seed in range(100) for k in range(16)]
    assert len({s % 2**32 for s in seeds}) == 1600 and all(0 <= s < 2**63 for s in seeds)
    assert seeds[:16] == [first_seed(0) + k for k in range(16)]  # as vLLM seeds the samples of one request


@pytest.mark.parametrize("kind", ["scripted", "replay"])
def test_each_completion_is_told_once(kind: str) -> None:
    told: dict[tuple[int, int], Completion] = {}
    recorded = [rollout("a", 0), rollout("a", 1), rollout("b", 0), rollout("b", 1)]
    made = engine() if kind == "scripted" else ReplayEngine(recorded, {"a": [1, 2], "b": [3, 4]})
    groups = made.generate([[1, 2], [3, 4]], SAMPLING, 2, [0, 1], lambda i, k, c: told.update({(i, k): c}))
    assert told == {(i, k): c for i, group in enumerate(groups) for k, c in enumerate(group)}


def test_non_finite_logprobs_name_their_sample() -> None:
    error = NonFiniteLogprobs([(4, 2, 7), (5, 0, 0)])
    again = pickle.loads(pickle.dumps(error))
    assert again.samples == error.samples and str(again) == str(error)
    assert "2 completions" in str(error) and "prompt 4, sample 2, token 7" in str(error)


def test_no_torch_is_imported() -> None:
    code = "import sys, pivotrl.generation.scripted; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
