"""Re-profiling and dynamic sampling over a scripted policy that gets better: which pivots, what it costs, resuming."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_profile import STOP, Equal, Letters, make, turns, use

from pivotrl.config import Config, Reprofile
from pivotrl.errors import UserError
from pivotrl.generation.engine import Sampling
from pivotrl.generation.scripted import ScriptedEngine
from pivotrl.io import read_json, read_jsonl
from pivotrl.local_rollouts import LocalRoller, State
from pivotrl.profiling.select import run_select
from pivotrl.profiling.stage import run_profile
from pivotrl.training.batch import make_batch
from pivotrl.training.pivot_source import PivotSource, is_mixed, keep_mixed
from pivotrl.training.reprofile import why_due
from pivotrl.validation import conflicts

TURNS = turns(30, seed=11)


class Learner:
    """Right with the chance that the prompt tells (fake_profile) plus `skill` tenths; never of a hopeless turn."""

    def __init__(self) -> None:
        self.skill = 0.0
        self.engine = ScriptedEngine(self.script, stop_token_ids=[STOP])

    def script(self, prompt: Sequence[int], k: int, seed: int) -> list[int]:
        tenths = prompt[1] - ord("0")
        chance = 0.0 if tenths == 0 else 1.0 if tenths == 9 else tenths / 10 + self.skill
        return [ord("a" if random.Random(f"{prompt}/{k}/{seed}").random() < chance else "b"), STOP]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Config, Path]:
    """A profile and selection of pi_0."""
    use(monkeypatch, tmp_path)
    cfg = make(tmp_path, TURNS, in_flight=64)
    cfg.algorithm.pivots_per_step, cfg.algorithm.group_size = 4, 6
    run_profile(cfg, tmp_path)
    run_select(cfg, tmp_path)
    return cfg, tmp_path


def pivots(run_dir: Path) -> list[State]:
    ids = {row["turn_id"] for row in read_jsonl(run_dir / "select" / "pivots.jsonl")}
    made = sorted((t for t in TURNS if t.id in ids), key=lambda t: (t.trajectory_id, t.depth))
    return [State(t, tuple(Letters().prompt_ids(t.messages, []))) for t in made]


def source(cfg: Config, run_dir: Path, learner: Learner) -> PivotSource:
    roller = LocalRoller(learner.engine, Letters(), Equal(), Sampling(max_new_tokens=4))  # type: ignore[arg-type]
    return PivotSource(pivots(run_dir), roller, cfg, run_dir)


def train(made: PivotSource, learner: Learner, steps: range, gain: float = 0.04) -> list[tuple[Any, ...]]:
    """A training loop in small: the skill after a step is a function of the step. What each step saw."""
    seen = []
    for step in steps:
        learner.skill = gain * step
        renewed = made.renew(step)
        drawn, groups = made.sample(step)
        actions = [[r.action.text for r in group] for group in groups]
        told = tuple(v for k, v in sorted(renewed.items()) if not k.startswith("seconds"))
        seen.append((step, [s.turn.id for s in drawn], actions, told))
    return seen


def test_when_it_is_due() -> None:
    assert why_due(Reprofile(), 10_000, [0.0] * 50) is None
    assert why_due(Reprofile(every_steps=5), 4, []) is None
    assert why_due(Reprofile(every_steps=5), 5, []) == "5 steps on the same pivots"
    by_share = Reprofile(below_mixed=0.5, window=4)
    assert why_due(by_share, 3, [0.0] * 3) is None  # too few steps to tell
    assert why_due(by_share, 9, [1.0, 0.5, 0.5, 0.5, 0.5]) is None  # not lower
    assert why_due(by_share, 9, [1.0, 0.5, 0.5, 0.25, 0.5]) == "0.44 of the last groups mixed, below 0.5"


def test_without_it_the_draw_is_that_of_the_selected_pivots(run: tuple[Config, Path]) -> None:
    cfg, run_dir = run
    learner = Learner()
    made = source(cfg, run_dir, learner)
    chosen = {s.turn.id for s in pivots(run_dir)}
    for _, ids, actions, told in train(made, learner, range(6)):
        assert len(ids) == 4 and set(ids) <= chosen and not told
        assert all(len(group) == 6 for group in actions)
    assert not (run_dir / "train" / "reprofile").exists()
    assert made.costs()["train"]["rollouts"] == 6 * 4 * 6
    assert set(made.costs()) == {"train"}


@pytest.mark.parametrize("limit", [None, 20])
def test_new_pivots_are_those_of_the_present_policy(run: tuple[Config, Path], limit: int | None) -> None:
    cfg, run_dir = run
    cfg.algorithm.reprofile = Reprofile(every_steps=5, turns=limit)
    learner = Learner()
    made = source(cfg, run_dir, learner)
    train(made, learner, range(5))
    before, first = {s.turn.id for s in pivots(run_dir)}, list(read_jsonl(run_dir / "profile" / "turns.jsonl"))
    learner.skill = 0.45  # what was mixed with a low mean is easy now; 1 and 3 tenths remain, 5 and 8 leave
    told = made.renew(5)
    folder = run_dir / "train" / "reprofile" / "step-000005"
    rows = list(read_jsonl(folder / "profile" / "turns.jsonl"))
    assert [r["turn_id"] for r in rows] == [r["turn_id"] for r in first]
    fresh = [r for r in rows if r.get("step") == 5]
    assert len(fresh) == (limit or len(rows)) == told["reprofile_turns"]
    assert all(r == old for r, old in zip(rows, first, strict=True) if "step" not in r)
    kept = {r["turn_id"] for r in read_jsonl(folder / "select" / "pivots.jsonl")}
    assert kept == {r["turn_id"] for r in rows if r["variance"] and r["mean"] < 0.6}
    assert told["reprofile_entered"] == len(kept - before)
    assert told["reprofile_left"] == len(before - kept) > 0
    if limit is None:
        assert not any("p5" in t.messages[0]["content"] for t in TURNS if t.id in kept)
    assert {i for _, ids, _, _ in train(made, learner, range(5, 10), gain=0.0) for i in ids} == kept
    record = read_json(folder / "fingerprint.json")
    assert record["weights"].endswith("after 5 training steps")
    assert {**record, "weights": 0} == {**read_json(run_dir / "profile" / "summary.json")["fingerprint"], "weights": 0}
    assert made.costs()["reprofile"]["rollouts"] >= 8 * (limit or len(rows))


def test_rollouts_of_a_reprofile_are_new_ones(run: tuple[Config, Path]) -> None:
    cfg, run_dir = run
    cfg.algorithm.reprofile = Reprofile(every_steps=2)
    learner = Learner()
    made = source(cfg, run_dir, learner)
    train(made, learner, range(5), gain=0.0)  # a policy that stays the same
    files = [run_dir / "profile", *(run_dir / "train" / "reprofile" / f"step-00000{s}" / "sample" for s in (2, 4))]
    rewards = [[r["rewards"] for r in read_jsonl(f / "turns.jsonl")] for f in files]
    assert rewards[0] != rewards[1] != rewards[2] != rewards[0]


def test_the_share_of_mixed_groups_calls_for_it(run: tuple[Config, Path]) -> None:
    cfg, run_dir = run
    cfg.algorithm.reprofile = Reprofile(below_mixed=0.5, window=3)
    learner = Learner()
    made = source(cfg, run_dir, learner)
    seen = train(made, learner, range(30), gain=0.05)
    renewed = [step for step, _, _, told in seen if told]
    assert renewed and renewed[0] >= 3
    window = [sum(len(set(g)) > 1 for g in actions) / 4 for _, _, actions, _ in seen]
    for step in renewed[:1]:
        assert sum(window[step - 3 : step]) / 3 < 0.5
        assert all(sum(window[s - 3 : s]) / 3 >= 0.5 for s in range(3, step))


def test_no_pivot_left_goes_on_with_the_former_ones_and_says_so(
    run: tuple[Config, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    cfg, run_dir = run
    cfg.algorithm.reprofile = Reprofile(every_steps=3)
    learner = Learner()
    made = source(cfg, run_dir, learner)
    train(made, learner, range(3))
    learner.skill = 1.0
    told = made.renew(3)
    assert (told["reprofile_kept"], told["reprofile_left"]) == (0.0, 0.0)
    assert "Going on with the former ones: no pivot kept" in capsys.readouterr().err
    assert {s.turn.id for s in made.sample(3)[0]} <= {s.turn.id for s in pivots(run_dir)}
    assert made.state()["set"] is None and made.state()["since"] == 3  # not tried again at every step


@pytest.mark.parametrize("refills", [0, 2])
def test_resumed_at_any_step_it_goes_on_as_if_uninterrupted(run: tuple[Config, Path], refills: int) -> None:
    cfg, run_dir = run
    cfg.algorithm.reprofile = Reprofile(every_steps=4, below_mixed=0.6, window=3, turns=60)
    cfg.algorithm.dynamic_sampling = refills
    learner, states, whole = Learner(), [], []
    made = source(cfg, run_dir, learner)
    for step in range(12):
        states.append(json.loads(json.dumps(made.state())))
        whole += train(made, learner, range(step, step + 1))
    assert sum(bool(told) for *_, told in whole) >= 2
    root = run_dir / "train" / "reprofile"
    for start in (11, 8, 5, 4, 1, 0):
        if (root / f"step-{start:06d}").exists():  # killed in the middle of that re-profile
            (root / f"step-{start:06d}" / "summary.json").unlink()
            rollouts = root / f"step-{start:06d}" / "sample" / "rollouts.jsonl"
            rollouts.write_bytes(rollouts.read_bytes()[:-700])
        again = source(cfg, run_dir, learner)
        again.restore(states[start] if start else None, start)
        assert all(int(p.name[5:]) <= start for p in root.glob("step-*"))
        assert train(again, learner, range(start, 12)) == whole[start:], start


def test_turns_of_another_run_are_told(run: tuple[Config, Path]) -> None:
    cfg, run_dir = run
    cfg.algorithm.reprofile = Reprofile(every_steps=1)
    learner = Learner()
    made = source(cfg, run_dir, learner)
    train(made, learner, range(1))
    make(run_dir, TURNS[3:])
    with pytest.raises(UserError, match="3 turns that were profiled are not there"):
        made.renew(1)


@pytest.mark.parametrize("refills", [1, 3, 40])
def test_dynamic_sampling_refills_within_its_bound(run: tuple[Config, Path], refills: int) -> None:
    cfg, run_dir = run
    cfg.algorithm.dynamic_sampling = refills
    learner = Learner()
    learner.skill = -0.05  # half of the pivots are of 1 tenth: many groups are all wrong
    made = source(cfg, run_dir, learner)
    calls = refilled = 0
    for step in range(10):
        before = learner.engine.generate_calls
        drawn, groups = made.sample(step)
        used = learner.engine.generate_calls - before
        mixed = sum(map(is_mixed, groups))
        assert used <= 1 + refills
        assert mixed == 4 or (used == 1 + refills and mixed < 4)
        assert len(drawn) == len(groups) >= 4
        calls, refilled = calls + used, refilled + len(groups) - 4
    assert calls > 10
    costs = made.costs()
    assert costs["train"]["rollouts"] == 10 * 4 * 6
    assert costs["refill"]["rollouts"] == 6 * refilled > 0


def test_the_batch_holds_mixed_groups_alone_and_metrics_hold_all(run: tuple[Config, Path]) -> None:
    cfg, run_dir = run
    cfg.algorithm.dynamic_sampling = 3
    learner = Learner()
    learner.skill = -0.05
    drawn, groups = source(cfg, run_dir, learner).sample(0)
    whole = make_batch(drawn, groups, cfg.algorithm)
    kept = keep_mixed(whole, len(groups))
    mixed = [i for i, group in enumerate(groups) if is_mixed(group)]
    assert sorted({r.group for r in kept.rollouts}) == mixed
    assert len(kept.rollouts) == 6 * len(mixed)
    assert kept.metrics["groups_drawn"] == len(groups) > kept.metrics["groups_trained"] == len(mixed)
    assert kept.metrics["reward"] == whole.metrics["reward"]


def test_unscorable_makes_no_group_mixed() -> None:
    def group(*rewards: float | None) -> Any:
        return [SimpleNamespace(verdict=SimpleNamespace(reward=r)) for r in rewards]

    assert [is_mixed(group(*r)) for r in ([1.0, None], [None, None], [1.0, 0.0, None], [0.0, 0.0])] == [
        *(False, False, True, False)
    ]


@pytest.mark.parametrize(
    ("settings", "part"),
    [
        (Reprofile(below_mixed=1.5), "below_mixed=1.5 is a share"),
        (Reprofile(turns=10), "does nothing without"),
        (Reprofile(every_steps=0), "every_steps=0 must be positive"),
        (Reprofile(every_steps=1, window=0), "window=0 must be positive"),
    ],
)
def test_settings_that_cannot_be(settings: Reprofile, part: str) -> None:
    cfg = Config()
    cfg.algorithm = replace(cfg.algorithm, reprofile=settings)
    assert any(part in text for text in conflicts(cfg, "train", 1, False))


def test_a_job_of_several_processes_may_reprofile() -> None:
    cfg = Config()
    cfg.algorithm.reprofile = Reprofile(every_steps=5)
    for world in (1, 8):
        assert not any("algorithm.reprofile" in text for text in conflicts(cfg, "train", world, False))
