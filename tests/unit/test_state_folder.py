"""Names, commits and pruning of checkpoints; what a resumed configuration may change; deadlines."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl import stage_state, stopping
from pivotrl.config import Checkpoint
from pivotrl.configuration import load_config, subset
from pivotrl.errors import UserError
from pivotrl.policy.state_files import rectangles
from pivotrl.state_folder import StateFolder, kept, remedy


def saved(folder: StateFolder, step: int) -> Path:
    temporary = folder.begin(step)
    (temporary / "state.json").write_text(json.dumps({"format": 1, "step": step, "files": {}}))
    return folder.commit(step)


def test_only_committed_checkpoints_are_found_in_order_of_steps(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    assert folder.committed() == []
    for step in (10, 9, 100):
        saved(folder, step)
    os.utime(folder.path(9), (2e9, 2e9))  # a clock that jumped
    folder.begin(101)
    (folder.root / "step-7").mkdir()
    (folder.root / "step-00000008").mkdir()  # without its state.json
    assert folder.committed() == [9, 10, 100]
    assert folder.clean() == ["step-00000101.tmp"]
    assert folder.committed() == [9, 10, 100]
    assert folder.read(10)["step"] == 10


def test_removed_and_damaged_ones_are_not_found(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path)
    for step in (1, 2, 3):
        saved(folder, step)
    folder.remove(folder.path(1))
    assert folder.set_aside(2).name == "step-00000002.damaged-1"
    saved(folder, 2)
    assert folder.set_aside(2).name == "step-00000002.damaged-2"
    assert folder.committed() == [3]
    (folder.path(3) / "state.json").write_text('{"format": 1')
    with pytest.raises(UserError, match=r"state\.json: cannot be read"):
        folder.read(3)


def test_what_is_kept() -> None:
    scores = {2: 0.5, 4: 0.9, 6: 0.1, 8: 0.9}
    assert kept([2, 4, 6, 8], scores, last=1, every=None, best=0) == {8}
    assert kept([2, 4, 6, 8], scores, last=2, every=4, best=0) == {4, 6, 8}
    assert kept([2, 4, 6, 8], scores, last=1, every=None, best=1) == {8}  # of equals, the newer
    assert kept([2, 4, 6], scores, last=1, every=None, best=1) == {4, 6}
    assert kept([2, 4, 6, 8], scores, last=1, every=3, best=2, finished=True) == {4, 6, 8}
    assert kept([2, 4], {}, last=1, every=None, best=3, finished=True) == set()


def test_remedies_name_place_and_deed(tmp_path: Path) -> None:
    full = remedy(OSError(errno.ENOSPC, "No space left on device"), tmp_path / "not" / "there")
    assert "No space left on device" in full
    assert "delete files, or lower checkpoint.keep_last" in full
    assert "give this user access" in remedy(PermissionError(errno.EACCES, "Permission denied"), tmp_path)


def test_what_a_resumed_run_may_change() -> None:
    def found(*overrides: str, stage: str = "train", done: int = 3) -> list[str]:
        old = subset(load_config(["algorithm.steps=6", "sft.steps=6"]), stage)
        new = subset(load_config(["algorithm.steps=6", "sft.steps=6", *overrides]), stage)
        return stage_state.hindrances(old, new, stage, done)

    assert (
        found() == found("parallel.tensor=2", "algorithm.steps=60", "cluster.nodes=4", "checkpoint.keep_last=3") == []
    )
    step = ("recompute=true", "cpu_offload=true", "overlap_grad_reduce=true", "max_nonfinite_steps=9")
    assert found(*(f"algorithm.optimizer.{key}" for key in (*step, "tokens_per_microbatch=512"))) == []
    assert found("generation.tensor_parallel=2", "generation.enforce_eager=false") == []
    assert found("algorithm.group_size=4") == ["algorithm.group_size: 8 -> 4"]
    assert found("algorithm.steps=2") == ["algorithm.steps: 6 -> 2 (3 steps are done)"]
    assert found("algorithm.steps=3") == []
    assert len(found("algorithm.optimizer.schedule=linear", "algorithm.steps=7")) == 2
    assert found("sft.steps=7", stage="sft") == []
    assert found("sft.optimizer.tokens_per_microbatch=512", stage="sft") == []
    assert found("end_to_end.steps=30", "algorithm.optimizer.tokens_per_microbatch=512", stage="e2e") == []
    assert found("end_to_end.group_size=4", stage="e2e") == ["end_to_end.group_size: 8 -> 4"]
    assert found("sft.optimizer.beta1=0.8", stage="sft") == ["sft.optimizer.beta1: 0.9 -> 0.8"]


def test_only_an_interrupted_stage_with_a_checkpoint_may_change_its_layout(tmp_path: Path) -> None:
    before, after = load_config(["algorithm.steps=6"]), load_config(["algorithm.steps=6", "parallel.tensor=2"])
    stage_state.begin(before, tmp_path / "train", stage_state.record_of(before, "train", tmp_path))
    (tmp_path / "train" / "rollouts.jsonl").write_text("")
    record = stage_state.record_of(after, "train", tmp_path)
    assert stage_state.changes(tmp_path / "train", record) == ["parallel.tensor: 1 -> 2"]
    saved(StateFolder(tmp_path / "train"), 2)
    assert stage_state.changes(tmp_path / "train", record) == []
    (tmp_path / "train" / "summary.json").write_text("{}")
    assert stage_state.changes(tmp_path / "train", record) == ["parallel.tensor: 1 -> 2"]


def test_deadlines_count_from_the_job() -> None:
    slurm = {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "15400"}  # four hours
    both = Checkpoint(stop_after_minutes=60, stop_before_end_minutes=5)
    assert stopping.seconds_until_deadline(both, slurm, 2000.0) == 2600.0
    assert stopping.seconds_until_deadline(Checkpoint(), slurm, 2000.0) == 13400 - 300
    assert stopping.seconds_until_deadline(Checkpoint(), {}, 2000.0) is None
    assert stopping.seconds_until_deadline(Checkpoint(stop_after_minutes=1), {}, 2000.0) == 60.0
    short = {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "1120"}
    assert stopping.seconds_until_deadline(Checkpoint(), short, 1000.0) == 120 - 12  # not at once
    child = stopping.child_environment({})
    assert stopping.child_environment(child) == child
    assert stopping.seconds_until_deadline(Checkpoint(stop_after_minutes=1), child, 0.0) > 60


@settings(max_examples=60)
@given(st.lists(st.integers(1, 4), max_size=4), st.data())
def test_runs_are_cut_into_rectangles(shape: list[int], data: st.DataObject) -> None:
    total = math.prod(shape)
    begin = data.draw(st.integers(0, total))
    end = data.draw(st.integers(begin, total))
    whole = torch.arange(total).reshape(shape)
    found = []
    for offsets, sizes, first in rectangles(shape, begin, end):
        part = whole[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        assert int(part.reshape(-1)[0]) == first
        found += part.reshape(-1).tolist()
    assert found == list(range(begin, end))
    assert len(list(rectangles(shape, begin, end))) <= max(1, 2 * len(shape) - 1)
