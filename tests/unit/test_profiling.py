"""The profiler over a scripted engine: resume equals uninterrupted, K is exact, unscorable is counted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pivotrl.generation.engine import Sampling
from pivotrl.generation.scripted import ScriptedEngine
from pivotrl.local_rollouts import LocalRoller, State, render_states, seed_for
from pivotrl.profiling.profiler import draw_turns, profile_states
from pivotrl.profiling.statistics import turn_row
from pivotrl.profiling.store import RolloutStore
from pivotrl.trajectories.schema import Action, Turn
from pivotrl.verifiers.base import Verdict

K = 4
STOP = 0


class Letters:
    """A renderer of one token a character; a completion is its text."""

    stop_token_ids = (STOP,)

    def prompt_ids(self, messages, tools) -> list[int]:
        return [ord(c) for m in messages for c in m["content"]]

    def parse(self, ids: Sequence[int], tools: Sequence[Any] = ()) -> Action:
        return Action("".join(chr(i) for i in ids if i != STOP))


class Equal:
    name, version = "equal", "1"

    def config(self):
        return {}

    def verify(self, turn: Turn, action: Action) -> Verdict:
        if action.text == "?":
            return Verdict(None, "judge_down")
        return Verdict(float(action.text == turn.demonstration.text), "compared")


def script(prompt: tuple[int, ...], k: int, seed: int) -> list[int]:
    return [random.Random(f"{prompt}/{k}/{seed}").choice([ord("a"), ord("b"), ord("?")]), STOP]


def turn(trajectory: int, depth: int) -> Turn:
    state = [{"role": "user", "content": f"t{trajectory} " + "x" * depth}]
    return Turn(
        f"{trajectory}#{depth}", str(trajectory), str(trajectory), depth, "d", "train", state, [], Action("a"), "f:1"
    )


TURNS = [turn(i, j) for i in range(5) for j in range(3)]
STATES = [State(t, tuple(Letters().prompt_ids(t.messages, []))) for t in TURNS]


def roller(engine: ScriptedEngine | None = None) -> LocalRoller:
    engine = engine or ScriptedEngine(script, stop_token_ids=[STOP])
    return LocalRoller(engine, Letters(), Equal(), Sampling(max_new_tokens=4))  # type: ignore[arg-type]


def profile(path: Path, states=STATES, chunk: int = 2) -> bytes:
    store = RolloutStore(path, K)
    profile_states(states, roller(), store, K, chunk, seed=7, on_chunk=lambda n: None)
    store.close()
    return path.read_bytes()


def test_every_turn_gets_exactly_k_rollouts(tmp_path: Path):
    lines = profile(tmp_path / "r.jsonl").splitlines()
    assert len(lines) == K * len(STATES)


def test_resume_after_a_cut_at_any_place_equals_uninterrupted(tmp_path: Path):
    whole = profile(tmp_path / "whole.jsonl")
    cuts = sorted({0, 1, len(whole) - 1, len(whole), *random.Random(0).sample(range(len(whole)), 60)})
    for cut in cuts:
        path = tmp_path / "cut.jsonl"
        path.write_bytes(whole[:cut])
        assert profile(path) == whole, f"cut at byte {cut}"


def test_chunks_do_not_change_rollouts(tmp_path: Path):
    assert profile(tmp_path / "a", chunk=1) == profile(tmp_path / "b", chunk=100)


def test_a_turn_s_rollouts_do_not_depend_on_the_others(tmp_path: Path):
    profile(tmp_path / "all")
    profile(tmp_path / "half", STATES[::2])
    everything = RolloutStore(tmp_path / "all", K).groups
    assert all(everything[t] == group for t, group in RolloutStore(tmp_path / "half", K).groups.items())


def test_a_kept_profile_is_not_generated_again(tmp_path: Path):
    profile(tmp_path / "r")
    engine = ScriptedEngine(script, stop_token_ids=[STOP])
    store = RolloutStore(tmp_path / "r", K)
    profile_states(STATES, roller(engine), store, K, 2, seed=7, on_chunk=lambda n: None)
    assert engine.generate_calls == 0


def test_unscorable_leaves_mean_and_variance_and_is_counted():
    state = STATES[0]
    group = roller().groups([state], 1, [1])[0] * 4
    rewards = [1.0, None, 0.0, 0.0]  # field report C12: the turn's K becomes 3
    group = [replace(r, verdict=Verdict(x, "x")) for r, x in zip(group, rewards, strict=True)]
    row = turn_row(state.turn, group)
    assert (row["n"], row["unscorable"], row["right"], row["wrong"]) == (4, 1, 1, 2)
    assert row["mean"] == pytest.approx(1 / 3)
    assert row["variance"] == pytest.approx(2 / 9)


def test_a_turn_without_any_verdict_has_no_mean():
    group = roller().groups([STATES[0]], 1, [1])[0]
    row = turn_row(TURNS[0], [replace(r, verdict=Verdict(None, "down")) for r in group])
    assert (row["mean"], row["variance"], row["unscorable"]) == (None, None, 1)


def test_what_cannot_be_profiled_is_audited():
    long = replace(turn(9, 0), messages=[{"role": "user", "content": "x" * 90}])
    other = replace(turn(9, 1), demonstration=Action("?"))
    states, skipped = render_states([TURNS[0], long, other], Letters(), Equal(), 100, 20)  # type: ignore[arg-type]
    assert [s.turn.id for s in states] == ["0#0"]
    assert [(s.turn_id, s.reason) for s in skipped] == [("9#0", "beyond_context"), ("9#1", "demonstration_unscorable")]
    assert skipped[0].detail == "prompt 90 + new 20 > context 100 tokens"  # field report E8


def test_draw_is_stable_and_in_the_order_of_the_trie():
    drawn = draw_turns(TURNS, 7, seed=1)
    assert len(drawn) == 7
    assert drawn == sorted(drawn, key=lambda t: (t.trajectory_id, t.depth))
    assert draw_turns(TURNS[::-1], 7, seed=1) == drawn
    assert draw_turns(TURNS, None, seed=1) == TURNS


def test_seeds_are_distinct_and_31_bits():
    seeds = [seed_for(0, "profile", t.id) for t in TURNS]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= s < 2**31 for s in seeds)
