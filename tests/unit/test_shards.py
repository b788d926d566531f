"""A profile in shards is the profile of one job, rollout for rollout; what is no whole set of shards is refused."""

from __future__ import annotations

import shutil
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from fake_profile import make, turns, use
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.cli import run_stage
from pivotrl.config import Adaptive, Config
from pivotrl.errors import UserError
from pivotrl.io import read_json, read_jsonl, write_json, write_jsonl
from pivotrl.profiling.profiler import draw_turns
from pivotrl.profiling.shards import Shard, parse_shard, turns_of
from pivotrl.profiling.stage import run_profile
from pivotrl.rollouts import read_rollouts
from pivotrl.stage_state import changes, is_done, place_of, record_of
from pivotrl.validation import conflicts

TURNS = turns(14)
HISTOGRAM = [40, 4, 3, 2, 2, 2, 2, 2, 20]


def at(cfg: Config, shard: str | None) -> Config:
    return replace(cfg, profile=replace(cfg.profile, shard=shard))


def profile(run_dir: Path, shards: int | None, **options: Any) -> dict[str, Any]:
    cfg = make(run_dir, TURNS, **options)
    if shards is None:
        return run_profile(cfg, run_dir)
    for i in reversed(range(shards)):  # the order of jobs is nobody's business
        run_profile(at(cfg, f"{i}/{shards}"), run_dir)
    return run_profile(at(cfg, "merge"), run_dir)


def lasting(summary: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in summary.items() if k not in ("seconds", "engine")}


@pytest.mark.parametrize("shards", [1, 2, 4, 40])
@pytest.mark.parametrize(
    "options",
    [{}, {"second_rollouts": 3}, {"adaptive": Adaptive(enabled=True, histogram=HISTOGRAM, error=0.1)}],
    ids=["fixed", "second", "adaptive"],
)
def test_shards_give_the_profile_of_one_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: int, options: dict[str, Any]
) -> None:
    use(monkeypatch, tmp_path)
    whole, merged = profile(tmp_path / "one", None, **options), profile(tmp_path / "many", shards, **options)
    for name in ("rollouts", "second"):
        files = [tmp_path / run / "profile" / f"{name}.jsonl" for run in ("one", "many")]
        assert files[0].exists() == files[1].exists() == (name == "rollouts" or "second_rollouts" in options)
        if files[0].exists():
            one, many = ({(r.turn_id, r.index): _plain(r) for r in read_rollouts(f)} for f in files)
            assert one == many
            assert len(many) == sum(1 for _ in read_rollouts(files[1]))
    rows = [(tmp_path / run / "profile" / "turns.jsonl").read_bytes() for run in ("one", "many")]
    assert rows[0] == rows[1]
    if not options:  # a fixed profile is in the order of the trie: equal byte for byte
        both = [(tmp_path / run / "profile" / "rollouts.jsonl").read_bytes() for run in ("one", "many")]
        assert both[0] == both[1]
    if shards <= 4:
        assert whole["mean_reward"] == pytest.approx(merged.pop("mean_reward"))
        assert lasting(merged) == {k: v for k, v in lasting(whole).items() if k != "mean_reward"}
    totals = {name: cost["rollouts"] for name, cost in merged["engine"].items()}
    assert totals == {name: cost["rollouts"] for name, cost in whole["engine"].items()}


def _plain(rollout: Any) -> dict[str, Any]:
    # The scripted engine's cache, like a real one's, depends on what went before; what was sampled does not.
    return {k: v for k, v in rollout.to_json().items() if k != "cached_prompt_tokens"}


@given(st.integers(1, 12), st.integers(0, 40), st.integers(0, 99))
def test_shards_part_the_trajectories(count: int, trajectories: int, seed: int) -> None:
    drawn = draw_turns(turns(trajectories, seed), None, 0)
    parts = [turns_of(drawn, Shard(i, count)) for i in range(count)]
    assert [t for part in parts for t in part] == drawn
    owners = [{t.trajectory_id for t in part} for part in parts]
    assert sum(map(len, owners)) == len(set().union(*owners))
    assert all(abs(len(part) - len(drawn) / count) <= 6 for part in parts)  # a trajectory has at most 6 turns


@pytest.mark.parametrize("text", ["4/4", "-1/4", "1/0", "1", "a/b", "", "1/4 "])
def test_bad_shards(text: str) -> None:
    with pytest.raises(UserError, match="i/n"):
        parse_shard(text)


def test_places() -> None:
    cfg = Config()
    assert [place_of(at(cfg, s), "profile") for s in (None, "merge", "1/4")] == [
        "profile",
        "profile",
        "profile/shards/1-of-4",
    ]
    assert place_of(at(cfg, "1/4"), "train") == "train"


def remove(shards: Path) -> None:
    shutil.rmtree(shards / "1-of-3")


def unfinish(shards: Path) -> None:
    (shards / "2-of-3" / "summary.json").unlink()


def mix(shards: Path) -> None:
    shutil.copytree(shards / "0-of-3", shards / "0-of-2")


def foreign(shards: Path) -> None:
    marker = read_json(shards / "1-of-3" / "fingerprint.json")
    write_json(shards / "1-of-3" / "fingerprint.json", {**marker, "weights": "other"})


def overlap(shards: Path) -> None:
    first = next(iter(read_jsonl(shards / "0-of-3" / "turns.jsonl")))
    write_jsonl(shards / "2-of-3" / "turns.jsonl", [*read_jsonl(shards / "2-of-3" / "turns.jsonl"), first])


def lose(shards: Path) -> None:
    write_jsonl(shards / "2-of-3" / "turns.jsonl", list(read_jsonl(shards / "2-of-3" / "turns.jsonl"))[1:])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (remove, "missing: 1/3"),
        (unfinish, "unfinished: 2/3"),
        (mix, "2 and 3 shards"),
        (foreign, "weights differ"),
        (overlap, "is also in"),
        (lose, "incomplete"),
        (shutil.rmtree, "has no shard"),
    ],
)
def test_what_is_no_whole_profile_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Any, told: str
) -> None:
    use(monkeypatch, tmp_path)
    cfg = make(tmp_path, TURNS)
    for i in range(3):
        run_profile(at(cfg, f"{i}/3"), tmp_path)
    damage(tmp_path / "profile" / "shards")
    with pytest.raises(UserError, match=told):
        run_profile(at(cfg, "merge"), tmp_path)
    assert not (tmp_path / "profile" / "rollouts.jsonl").exists()


def test_a_shard_continues_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, tmp_path)
    profile(tmp_path / "a", 2)
    whole = (tmp_path / "a" / "profile" / "rollouts.jsonl").read_bytes()
    cfg = at(make(tmp_path / "a", TURNS), "1/2")
    part = tmp_path / "a" / "profile" / "shards" / "1-of-2" / "rollouts.jsonl"
    part.write_bytes(part.read_bytes()[:-4000])
    run_profile(cfg, tmp_path / "a")
    run_profile(at(cfg, "merge"), tmp_path / "a")
    assert (tmp_path / "a" / "profile" / "rollouts.jsonl").read_bytes() == whole


def test_rollouts_of_another_setting_are_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, tmp_path)
    run_profile(make(tmp_path, TURNS), tmp_path)
    run_profile(make(tmp_path, TURNS, rollouts_per_turn=4), tmp_path)
    directory = tmp_path / "profile"
    assert sum(1 for _ in read_rollouts(directory / "rollouts.old-1.jsonl")) == 8 * len(TURNS)
    assert sum(1 for _ in read_rollouts(directory / "rollouts.jsonl")) == 4 * len(TURNS)
    assert asdict(Adaptive())["enabled"] is False
    assert "adaptive" not in read_json(directory / "fingerprint.json")  # profiles made before it stay valid


def test_the_command_keeps_books_of_every_shard_and_of_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, tmp_path)
    cfg = make(tmp_path, TURNS)
    for shard in ("1/2", "0/2", "merge"):
        assert run_stage("profile", at(cfg, shard), tmp_path) == 0
    assert "shards/1-of-2" in capsys.readouterr().out
    # To everything downstream the merged profile is the one that a single job would have made.
    assert changes(tmp_path / "profile", record_of(cfg, "profile", tmp_path)) == []
    assert is_done(tmp_path / "profile")
    assert is_done(tmp_path / "profile" / "shards" / "0-of-2")
    other = replace(cfg, profile=replace(cfg.profile, rollouts_per_turn=4))
    with pytest.raises(UserError, match="rollouts_per_turn: 8 -> 4"):
        run_stage("profile", at(other, "0/2"), tmp_path)


def test_conflicts_of_shards() -> None:
    cfg = at(Config(), "0/2")
    cfg.profile.adaptive = Adaptive(enabled=True)
    assert any("needs profile.adaptive.histogram" in text for text in conflicts(cfg, "profile"))
    assert any("for `pivotrl profile` alone" in text for text in conflicts(cfg, "run"))
    cfg.profile.adaptive = Adaptive(enabled=True, histogram=HISTOGRAM[:-1])
    assert any("K=8 needs 9" in text for text in conflicts(cfg, "profile"))
    cfg.profile.adaptive = Adaptive(enabled=True, histogram=HISTOGRAM)
    assert not any("profile." in text for text in conflicts(cfg, "profile"))
    assert any("neither i/n" in text for text in conflicts(at(cfg, "2/2")))
