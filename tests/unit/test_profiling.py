"""The profiler over a scripted engine: resume equals uninterrupted, K is exact, unscorable is counted."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pivotrl.errors import UserError
from pivotrl.generation.engine import Sampling
from pivotrl.generation.scripted import ScriptedEngine
from pivotrl.local_rollouts import LocalRoller, State, render_states, seed_for
from pivotrl.profiling.ledger import Cost
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
    profile_states(states, roller, store, K, chunk, 7, lambda states, cost: None)
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
    everything, half = RolloutStore(tmp_path / "all", K), RolloutStore(tmp_path / "half", K)
    assert list(half) == [s.turn.id for s in STATES[::2]]
    assert all(everything.rollouts(t) == half.rollouts(t) for t in half)


def test_a_kept_profile_is_not_generated_again(tmp_path: Path):
    profile(tmp_path / "r")

    def no_engine() -> LocalRoller:
        raise AssertionError("an engine was started for nothing")

    profile_states(STATES, no_engine, RolloutStore(tmp_path / "r", K), K, 2, 7, lambda states, cost: None)


def test_costs_are_told_by_chunk(tmp_path: Path):
    costs: list[Cost] = []
    store = RolloutStore(tmp_path / "r", K)
    profile_states(STATES, roller, store, K, 2, 7, lambda states, cost: costs.append(cost))
    total = sum(costs, Cost())
    rollouts = [r for s in STATES for r in store.rollouts(s.turn.id)]
    assert total.rollouts == K * len(STATES)
    assert total.generated == sum(len(r.completion.token_ids) for r in rollouts)
    assert total.prompt == K * sum(len(s.prompt_ids) for s in STATES)
    assert all(c.seconds > 0 for c in costs)


@pytest.mark.parametrize(
    ("broken", "line"),
    [
        (lambda rows: rows + rows[:K], len(STATES) * K + 1),  # a turn twice
        (lambda rows: rows[1:], 1),
        (lambda rows: rows[:2] + rows[3:], 3),
        (lambda rows: rows[:5] + [b"{\n"] + rows[6:], 6),
        (lambda rows: rows[:5] + [rows[9]] + rows[6:], 6),
    ],
)
def test_damage_that_no_kill_leaves_is_refused(tmp_path: Path, broken, line: int):
    rows = profile(tmp_path / "r").splitlines(keepends=True)
    damaged = b"".join(broken(rows))
    (tmp_path / "r").write_bytes(damaged)
    with pytest.raises(UserError, match=f"r:{line}: "):
        RolloutStore(tmp_path / "r", K)
    assert (tmp_path / "r").read_bytes() == damaged  # nothing is thrown away


def test_store_refuses_groups_out_of_turn(tmp_path: Path):
    groups = roller().groups(STATES[:2], K, [1, 2])
    store = RolloutStore(tmp_path / "r", K)
    for wrong in (groups[0][:2], groups[0][::-1], [*groups[0][:3], groups[1][3]]):
        with pytest.raises(ValueError, match="needs"):
            store.append([wrong])
    store.append(groups)
    with pytest.raises(ValueError, match="needs"):
        store.append(groups[:1])


def test_rows_of_another_key_order_and_odd_ids_are_read(tmp_path: Path):
    odd = [replace(r, turn_id='a"\\\u2028é#0') for r in roller().groups(STATES[:1], K, [1])[0]]
    store = RolloutStore(tmp_path / "r", K)
    store.append([odd])
    assert store.rollouts(odd[0].turn_id) == odd
    rows = [json.loads(line) for line in (tmp_path / "r").read_bytes().splitlines()]
    text = "".join(json.dumps(dict(reversed(row.items()))) + "\n" for row in rows)
    (tmp_path / "r").write_text(text)
    assert RolloutStore(tmp_path / "r", K).rollouts(odd[0].turn_id) == odd


def test_unscorable_leaves_mean_and_variance_and_is_counted():
    state = STATES[0]
    group = roller().groups([state], 1, [1])[0] * 4
    rewards = [1.0, None, 0.0, 0.0]  # field report C12: the turn's K becomes 3
    group = [replace(r, verdict=Verdict(x, "x")) for r, x in zip(group, rewards, strict=True)]
    row = turn_row(state.turn, [r.to_json() for r in group])
    assert (row["n"], row["unscorable"], row["right"], row["wrong"]) == (4, 1, 1, 2)
    assert row["mean"] == pytest.approx(1 / 3)
    assert row["variance"] == pytest.approx(2 / 9)


def test_a_turn_without_any_verdict_has_no_mean():
    group = roller().groups([STATES[0]], 1, [1])[0]
    row = turn_row(TURNS[0], [replace(r, verdict=Verdict(None, "down")).to_json() for r in group])
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
