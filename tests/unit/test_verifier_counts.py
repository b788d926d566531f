"""What the verifier's runner counts reaches the files of a run; processes of a stage share verdicts and counts."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import fake_profile
import pytest
from verifier_doubles import Scripted, act, turn

from pivotrl import peers
from pivotrl.config import VerifierConfig
from pivotrl.io import read_json, read_jsonl, write_jsonl
from pivotrl.profiling import stage
from pivotrl.profiling.ledger import added
from pivotrl.rollouts import TokenCounts
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.runner import VerifierRunner, open_verifier, take_counts


class Costly(fake_profile.Equal):
    """Says what each verdict cost, as a judge does."""

    def verify(self, turn: Any, action: Any) -> Verdict:
        found = super().verify(turn, action)
        counts = {"judge/requests": 1, "judge/cost": 0.25}
        return Verdict(found.reward, found.reason, {"counts": counts})


def test_counts_since_the_last_time():
    one = turn(act(text="ok"))
    with VerifierRunner(Scripted, workers=1, timeout_seconds=1.0) as runner:
        runner.score([(one, act(text=t)) for t in ("a", "a", "sleep", "raise", "b")])
        first = take_counts(runner)
        runner.score([(one, act(text="a"))])
        second = take_counts(runner)
        total = runner.metrics()
    assert (first["pairs"], first["cache_hits"], first["scored"], first["calls"]) == (5, 1, 3, 2)
    assert (first["unscorable/timeout"], first["unscorable/verifier_error"]) == (1, 1)
    assert first["workers_started"] >= 2 and first["workers_killed"] >= 1
    assert (second["pairs"], second["cache_hits"]) == (1, 1) and "unscorable/timeout" not in second
    assert {k: v for k, v in added([first, second]).items() if k != "seconds"} == {
        k: v for k, v in total.items() if k != "seconds"
    }
    assert take_counts(Scripted()) == {}


@pytest.mark.parametrize("profile", [{}, {"second_rollouts": 4}])
def test_a_profile_says_what_its_verdicts_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, profile: Any):
    """Also what an attempt took that was killed: its rollouts are kept, and so is their cost."""
    made = fake_profile.turns(4)
    cfg = fake_profile.make(tmp_path, made, **profile)
    runner = VerifierRunner(Costly)
    monkeypatch.setattr(fake_profile.Bench, "verifier", runner)
    fake_profile.use(monkeypatch, tmp_path)
    append, calls = stage.RolloutStore.append, []

    def dies(self: Any, groups: Any) -> None:
        append(self, groups)
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(stage.RolloutStore, "append", dies)
    with pytest.raises(KeyboardInterrupt):
        stage.run_profile(cfg, tmp_path)
    stage.run_profile(cfg, tmp_path)
    found = read_json(tmp_path / "profile" / "summary.json")["verifier"]
    assert found["pairs"] == runner.metrics()["pairs"] > 8 * len(made)
    assert found["judge/cost"] == 0.25 * found["judge/requests"] == runner.metrics()["judge/cost"]
    assert found["cache_hits"] > 0  # "a" again and again
    assert added(read_jsonl(tmp_path / "profile" / "verifier.jsonl")) == found


def test_shards_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pairs = 0
    for shard in ("0/2", "1/2"):
        cfg = fake_profile.make(tmp_path, fake_profile.turns(6), shard=shard)
        monkeypatch.setattr(fake_profile.Bench, "verifier", VerifierRunner(Costly))
        fake_profile.use(monkeypatch, tmp_path)
        pairs += stage.run_profile(cfg, tmp_path)["verifier"]["pairs"]
    cfg.profile.shard = "merge"
    assert stage.run_profile(cfg, tmp_path)["verifier"]["pairs"] == pairs


def test_a_training_run_sums_its_steps(tmp_path: Path):
    from pivotrl.training.grpo import finish

    rows = [
        {"step": 0, "reward": 0.5, "verifier/pairs": 8, "verifier/unscorable/timeout": 2, "verifier/judge/cost": 0.5},
        {"step": 1, "reward": 0.75, "verifier/pairs": 8, "verifier/cache_hits": 3, "verifier/judge/cost": 0.25},
    ]
    write_jsonl(tmp_path / "metrics.jsonl", rows)
    wanted = {"cache_hits": 3, "judge/cost": 0.75, "pairs": 16, "unscorable/timeout": 2}
    assert finish(tmp_path, {"steps": 2}, TokenCounts(), 1.0)["verifier"] == wanted
    write_jsonl(tmp_path / "metrics.jsonl", [{"step": 0, "reward": 0.5}])
    assert "verifier" not in finish(tmp_path, {"steps": 1}, TokenCounts(), 1.0)  # end to end: no verifier


def test_every_stage_has_a_runner():
    assert isinstance(open_verifier(VerifierConfig("strict")), VerifierRunner)


# Several processes ------------------------------------------------------------------------------------


class World(ModuleType):
    """`pivotrl.policy.agree` of threads that stand for the processes of a stage."""

    def __init__(self, size: int) -> None:
        super().__init__("agree")
        self.local, self.size = threading.local(), size
        self.barrier, self.values = threading.Barrier(size, timeout=120), [None] * size

    def rank(self) -> int:
        return int(self.local.rank)

    def world(self) -> int:
        return self.size

    def everyone(self, value: Any) -> list[Any]:
        self.values[self.rank()] = value
        self.barrier.wait()
        found = list(self.values)
        self.barrier.wait()
        return found


def in_a_world(monkeypatch: pytest.MonkeyPatch, size: int, work: Any) -> list[Any]:
    import pivotrl.policy

    world = World(size)
    monkeypatch.setenv("WORLD_SIZE", str(size))
    monkeypatch.setitem(sys.modules, "pivotrl.policy.agree", world)
    monkeypatch.setattr(pivotrl.policy, "agree", world, raising=False)
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        world.local.rank = rank
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_each_process_does_a_share_and_all_hold_the_same(monkeypatch: pytest.MonkeyPatch, count: int):
    def work(rank: int) -> Any:
        asked: list[int] = []

        def score(items: Any) -> list[str]:
            asked.extend(items)
            return [f"{item} by {rank}" for item in items]  # no two processes would say the same

        return peers.work_together(list(range(count)), score), asked, peers.sum_of_all({"pairs": len(asked), "x": 1})

    found = in_a_world(monkeypatch, 3, work)
    assert found[0][0] == found[1][0] == found[2][0]
    assert [text.split()[0] for text in found[0][0]] == [str(i) for i in range(count)]
    assert sorted(item for _, asked, _ in found for item in asked) == list(range(count))
    assert all(counts == {"pairs": count, "x": 3} for _, _, counts in found)


def test_an_error_in_one_process_is_raised_in_all(monkeypatch: pytest.MonkeyPatch):
    def work(rank: int) -> Any:
        def score(items: Any) -> list[int]:
            if rank == 1:
                raise ValueError("no worker starts here")
            return list(items)

        return peers.work_together(range(6), score)

    assert [str(error) for error in in_a_world(monkeypatch, 2, work)] == ["no worker starts here"] * 2


def test_alone_nobody_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert peers.work_together([1, 2], lambda items: [i * 2 for i in items]) == [2, 4]
    assert peers.sum_of_all({"a": 1.5}) == {"a": 1.5}
