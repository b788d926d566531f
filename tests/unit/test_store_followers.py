"""One rollout file, several processes with the same rollouts: the first writes, the others read what it wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from pivotrl.errors import UserError
from pivotrl.generation.engine import Completion
from pivotrl.profiling import store as store_module
from pivotrl.profiling.store import RolloutStore
from pivotrl.rollouts import Rollout
from pivotrl.trajectories.schema import Action
from pivotrl.verifiers.base import Verdict


def group(turn: str, size: int = 2) -> list[Rollout]:
    completion = Completion((1, 2), (-0.5, -0.1), "stop", 0)
    return [Rollout(turn, k, 3, completion, Action(f"日本 {turn}"), Verdict(1.0, "ok")) for k in range(size)]


def opened(path: Path, rank: int, monkeypatch: pytest.MonkeyPatch) -> RolloutStore:
    monkeypatch.setenv("RANK", str(rank))
    return RolloutStore(path, 2)


def test_followers_read_what_the_first_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rollouts.jsonl"
    first, other = opened(path, 0, monkeypatch), opened(path, 1, monkeypatch)
    for turns in (("a", "b"), ("c",)):
        for store in (first, other):
            store.append([group(turn) for turn in turns])
        assert all(other.rollouts(turn) == first.rollouts(turn) == group(turn) for turn in turns)
    assert path.read_text().count("\n") == 6
    assert list(other) == list(first) == ["a", "b", "c"]
    first.close()
    other.close()


def test_followers_leave_a_torn_tail_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rollouts.jsonl"
    first = opened(path, 0, monkeypatch)
    first.append([group("a")])
    first.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:30])
    other = opened(path, 1, monkeypatch)
    assert path.read_bytes() == whole + whole[:30]
    assert list(other) == ["a"]
    first = opened(path, 0, monkeypatch)
    assert path.read_bytes() == whole
    for store in (other, first):
        store.append([group("b")])
    assert other.rollouts("b") == group("b")


def test_a_folder_that_is_not_shared_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_VISIBLE_SECONDS", 0.3)
    path = tmp_path / "rollouts.jsonl"
    opened(path, 0, monkeypatch)
    other = opened(path, 1, monkeypatch)
    other.append([group("a")])
    with pytest.raises(UserError, match="a file system that all nodes share"):
        other.rollouts("a")
