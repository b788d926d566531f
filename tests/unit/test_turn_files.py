"""turns.jsonl and messages.jsonl: every message once, every state whole again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl import config
from pivotrl.errors import UserError
from pivotrl.io import read_jsonl, write_jsonl
from pivotrl.profiling.stage import read_turns
from pivotrl.trajectories.reader import read_trajectories
from pivotrl.trajectories.schema import Action, JsonDict, Trajectory, Turn
from pivotrl.trajectories.turn_lines import TurnWriter, turns_in
from pivotrl.trajectories.turns import split_turns
from pivotrl.turns_stage import run_turns


def turn(place: int, trajectory: str = "T", split: str = "train", tools: list[JsonDict] | None = None) -> Turn:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": f"{trajectory}{i}é\u2028"} for i in range(9)]
    action = Action(messages[place]["content"], "why")
    name = f"{trajectory}#{place}"
    return Turn(name, trajectory, "task", place, "d", split, messages[:place], tools or [], action, "f:1", ["last"])


def written(folder: Path, turns: list[Turn]) -> Path:
    path = folder / "turns.jsonl"
    with TurnWriter(path, folder / "messages.jsonl") as writer:
        for item in turns:
            writer.write(item)
    return path


def shared_turns(shared_data: Path) -> list[Turn]:
    items = [i for i in read_trajectories(str(shared_data / "formats")) if isinstance(i, Trajectory)]
    return [turn for item in items for turn in split_turns(item, "train") if isinstance(turn, Turn)]


def test_turns_come_back_as_they_were(shared_data: Path, tmp_path: Path) -> None:
    turns = shared_turns(shared_data)
    path = written(tmp_path, turns)
    assert [t.to_json() for t in turns_in(path)] == [t.to_json() for t in turns] and len(turns) > 40
    rows, kept = list(read_jsonl(path)), list(read_jsonl(tmp_path / "messages.jsonl"))
    assert [row["trajectory_id"] for row in kept] == list(dict.fromkeys(row["trajectory_id"] for row in rows))
    sizes = {t.id: sum(len(json.dumps(m, ensure_ascii=False).encode()) for m in t.messages) for t in turns}
    tools = {t.id: len(json.dumps(t.tools, ensure_ascii=False).encode()) for t in turns}
    assert all(row["state_bytes"] == sizes[row["id"]] + tools[row["id"]] for row in rows)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.sampled_from("ABC"), st.sets(st.sampled_from(range(1, 9, 2)), min_size=1)), unique_by=lambda p: p[0]),  # noqa: E501
    st.sets(st.sampled_from(["A#1", "A#5", "B#3", "C#7"])),
)  # fmt: skip
def test_any_part_of_the_turns_can_be_read(
    tmp_path_factory: pytest.TempPathFactory, places: list[tuple[str, set[int]]], ids: set[str]
) -> None:
    made = [turn(i, name, "train" if name == "A" else "warmup") for name, chosen in places for i in sorted(chosen)]
    path = written(tmp_path_factory.mktemp("turns"), made)
    assert list(turns_in(path)) == made
    assert list(turns_in(path, "warmup")) == [t for t in made if t.split == "warmup"]
    assert list(turns_in(path, ids=ids)) == [t for t in made if t.id in ids]
    write_jsonl(path, reversed(list(read_jsonl(path))))  # another order is read too
    assert list(turns_in(path)) == made[::-1]


def test_files_grow_with_the_length_of_a_trajectory_not_its_square(tmp_path: Path) -> None:
    def size(turns: int) -> int:
        messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "x" * 400} for i in range(2 * turns)]
        file = tmp_path / "x.jsonl"
        file.write_text(json.dumps({"id": "t", "messages": messages}))
        cfg = config.Config(trajectories=config.Trajectories(path=str(file)))
        run_turns(cfg, tmp_path / str(turns))
        return sum(f.stat().st_size for f in (tmp_path / str(turns) / "turns").glob("*s.jsonl"))

    assert size(160) < 4.5 * size(40)  # whole states in every row: 16 times


def test_states_of_a_trajectory_share_their_messages(shared_data: Path, tmp_path: Path) -> None:
    path = str(shared_data / "tau_bench/airline_sft_compact.jsonl")
    run_turns(config.Config(trajectories=config.Trajectories(path=path)), tmp_path)
    rows = [row for row in read_jsonl(tmp_path / "turns/turns.jsonl") if row["split"] == "train"]
    found = read_turns(tmp_path, "train")
    assert [t.id for t in found] == [row["id"] for row in rows]
    by_trajectory: dict[str, list[Turn]] = {}
    for item in found:
        by_trajectory.setdefault(item.trajectory_id, []).append(item)
    for group in by_trajectory.values():
        assert len({id(message) for t in group for message in t.messages}) == len(group[-1].messages)
    assert len({id(t.tools) for t in found}) < len(by_trajectory)


def test_files_of_two_runs_are_refused(tmp_path: Path) -> None:
    path = written(tmp_path, [turn(1), turn(5)])
    whole = (tmp_path / "messages.jsonl").read_text()
    row = json.loads(whole)
    (tmp_path / "messages.jsonl").write_text(json.dumps({**row, "messages": row["messages"][:3]}) + "\n")
    with pytest.raises(UserError, match=r"messages\.jsonl: trajectory 'T' has 3 messages.*turn 'T#5' with 5 messages"):
        list(turns_in(path))
    (tmp_path / "messages.jsonl").unlink()
    with pytest.raises(UserError, match=r"messages\.jsonl: trajectory 'T' is not there.*run `pivotrl turns` again"):
        list(turns_in(path))


def test_a_row_may_hold_its_state_itself(tmp_path: Path) -> None:
    path = written(tmp_path, [turn(1)])
    own = replace(turn(3), trajectory_id="by hand")
    path.write_text(path.read_text() + json.dumps(own.to_json()) + "\n")
    assert list(turns_in(path)) == [turn(1), own]


def test_a_state_that_forgets_is_refused(tmp_path: Path) -> None:
    other = replace(turn(5), messages=[{"role": "user", "content": "other"}, *turn(5).messages[1:]])
    with pytest.raises(ValueError, match="does not begin"):
        written(tmp_path, [turn(3), other])
    with pytest.raises(ValueError, match="does not begin"):
        written(tmp_path, [turn(5), turn(3)])


def test_the_benchmark_measures_what_it_says(tmp_path: Path) -> None:
    from benchmarks.turns import measured, stream

    row = measured(20, 5)
    assert (row["trajectories"], row["turns"]) == (20, 100)
    assert 2 * row["bytes_per_turn"] < row["bytes_per_turn_repeated"]
    assert min(row[f"{key}_per_cpu_second"] for key in ("turns", "read_back")) > 0
    figures = stream(tmp_path / "rows.jsonl", 0.0005, 6, 30)
    assert figures["rows"] > 40 and figures["peak_mib"] >= figures["tenth_mib"] > 0
