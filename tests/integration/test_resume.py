"""A training run that is killed, stopped or out of disk at any instant goes on bit for bit."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoint_tools.dist_format import DistReader
from pivotrl.errors import UserError
from pivotrl.io import read_jsonl, write_json
from pivotrl.policy.state_files import RegionReader, checksum
from pivotrl.stopping import EXIT_STOPPED

sys.path.insert(0, str(Path(__file__).parent))
from resume_runs import EPISODES, STEPS, Server, assert_same, rows, serve, without_times


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, smollm2_tokenizer: Path) -> Iterator[Server]:
    small = {"hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    with serve(tmp_path_factory.mktemp("resume"), smollm2_tokenizer, "fake", **small) as made:
        yield made


@pytest.fixture(scope="module")
def straight(server: Server) -> Path:
    run_dir = server.new("straight")
    assert server.run(run_dir, umask="027") == 0, server.said()
    return run_dir


def test_an_undisturbed_run_keeps_what_it_should(straight: Path) -> None:
    assert [p.name for p in (straight / "train" / "state").iterdir()] == [f"step-{STEPS:08d}"]
    assert len(rows(straight)) == STEPS
    assert len({r["reward"] for r in rows(straight)}) > 1


def test_permissions_are_those_of_the_umask(straight: Path) -> None:
    made = list((straight / "train").rglob("*"))
    assert {p.stat().st_mode & 0o777 for p in made} == {0o750, 0o640}
    assert {"model.safetensors", "tokenizer.json", "__0_0.distcp", "rollouts.jsonl"} <= {p.name for p in made}


@pytest.mark.parametrize("stops", [(3,), (2, 4)], ids=["3+3", "2+2+2"])
def test_stopped_and_resumed_equals_straight(server: Server, straight: Path, stops: tuple[int, ...]) -> None:
    run_dir = server.new(f"stops{len(stops)}")
    done = 0
    for stop in stops:  # in the middle of a train step: it ends, is saved, and is not done again
        at = {"event": "train", "number": stop - done, "do": "USR1"}
        assert server.run(run_dir, at=at) == EXIT_STOPPED, server.said()
        assert f"stopped (SIGUSR1) after step {stop} of {STEPS}" in server.said()
        assert [p.name for p in (run_dir / "train" / "state").iterdir()] == [f"step-{stop:08d}"]
        done = stop
    assert server.run(run_dir) == 0, server.said()
    assert f"continues after step {done} of {STEPS}" in server.said()
    assert_same(run_dir, straight)


@pytest.mark.parametrize("background", ["true", "false"])
def test_killed_at_random_instants_equals_straight(server: Server, straight: Path, background: str) -> None:
    """Every few events of a run, most of them inside saves, kill -9; then at random times; then to the end."""
    run_dir = server.new(f"killed-{background}")
    overrides = ("checkpoint.every_steps=1", "checkpoint.keep_last=2", f"checkpoint.asynchronous={background}")
    draw = random.Random(background)
    reported = 0
    for number in (draw.randrange(30, 75) for _ in range(3)):
        assert server.run(run_dir, *overrides, at={"event": "any", "number": number, "do": "KILL"}) in (-9, 0)
        reported += "half-written" in server.said()
    for event in ("commit", "sync", "index", "remove"):
        server.run(run_dir, *overrides, at={"event": event, "number": draw.randrange(1, 3), "do": "KILL"})
        reported += "half-written" in server.said()
    server.run(run_dir, *overrides, kill_after=draw.uniform(0.5, 2.5))
    code = server.run(run_dir, *overrides)
    assert code == 0, server.said()
    assert reported >= 1
    assert_same(run_dir, straight)


@pytest.mark.parametrize("event", ["startup", "generate", "train", "piece", "export"])
def test_a_signal_in_any_phase_saves_and_resumes(server: Server, straight: Path, event: str) -> None:
    run_dir = server.new(f"signal-{event}")
    at = {"event": event, "number": 1 if event in ("startup", "export") else 2, "do": "TERM"}
    code = server.run(run_dir, "checkpoint.every_steps=2", at=at)
    said = server.said()
    if event == "export":  # the result was being written: it is finished
        assert code == 0, said
    else:
        assert code == EXIT_STOPPED, said
        assert "stopped (SIGTERM); the same command continues" in said
        if event != "startup":
            done = 1 if event == "generate" else 2  # the rollouts of a step that was broken off are drawn again
            assert f"stopped (SIGTERM) after step {done} of {STEPS}" in said
        assert server.run(run_dir) == 0, server.said()
    assert_same(run_dir, straight)


BESIDE = (
    "generation.server=http://127.0.0.1:9",  # the engine is a fake all the same
    "generation.weight_transfer=file",
    "algorithm.one_step_off=true",
    "algorithm.importance_correction=truncated",
)


def test_one_step_off_resumes_with_the_rollouts_of_older_weights(server: Server) -> None:
    """What was sampled for the next step before a kill cannot be sampled again: the weights are gone."""
    whole = server.new("beside")
    assert server.run(whole, *BESIDE) == 0, server.said()
    assert [r["staleness"] for r in rows(whole)] == [0.0] + [1.0] * (STEPS - 1)
    sampled = list(read_jsonl(whole / "train" / "rollouts.jsonl"))
    assert [r["weight_version"] for r in sampled] == [max(r["step"] - 1, 0) for r in sampled]
    assert [r["step"] for r in sampled] == sorted(r["step"] for r in sampled)
    parts = server.new("beside-parts")
    overrides = (*BESIDE, "checkpoint.every_steps=1")
    for event, number, do in (
        ("train", 2, "TERM"),
        ("generate", 1, "KILL"),
        ("refit", 2, "KILL"),
        ("train", 1, "KILL"),
    ):
        server.run(parts, *overrides, at={"event": event, "number": number, "do": do})
    server.run(parts, *overrides, kill_after=1.5)
    assert server.run(parts, *overrides) == 0, server.said()
    assert_same(parts, whole)


def test_a_second_signal_ends_at_once(server: Server, straight: Path) -> None:
    run_dir = server.new("second")
    assert server.run(run_dir, at={"event": "train", "number": 3, "do": "twice"}) == 128 + 15
    assert "a second signal (SIGTERM): ending at once" in server.said()
    assert server.run(run_dir) == 0, server.said()
    assert_same(run_dir, straight)


def test_sft_resumes(server: Server) -> None:
    whole, parts = server.new("sft-whole"), server.new("sft-parts")
    assert server.run(whole, stage="sft") == 0, server.said()
    for number in (2, 2):
        at = {"event": "train", "number": number, "do": "TERM"}
        assert server.run(parts, stage="sft", at=at) == EXIT_STOPPED, server.said()
    assert server.run(parts, stage="sft") == 0, server.said()
    assert_same(parts, whole, "sft")


def test_end_to_end_resumes(server: Server) -> None:
    whole, parts = server.new("e2e-whole"), server.new("e2e-parts")
    assert server.run(whole, *EPISODES, stage="e2e") == 0, server.said()
    assert [row["step"] for row in read_jsonl(whole / "e2e" / "curve.jsonl")] == [0, 2, 4, 6]
    at = {"event": "train", "number": 2, "do": "TERM"}
    assert server.run(parts, *EPISODES, stage="e2e", at=at) == EXIT_STOPPED, server.said()
    assert f"after step 2 of {STEPS}" in server.said()
    for number in (5, 9):  # within the episodes of a step: those are played again
        at = {"event": "generate", "number": number, "do": "KILL"}
        assert server.run(parts, *EPISODES, "checkpoint.every_steps=1", stage="e2e", at=at) == -9
    assert server.run(parts, *EPISODES, stage="e2e") == 0, server.said()
    assert "continues after step" in server.said()
    assert_same(parts, whole, "e2e")
    assert (parts / "e2e" / "episodes.jsonl").read_bytes() == (whole / "e2e" / "episodes.jsonl").read_bytes()
    curves = [[without_times(row) for row in read_jsonl(run / "e2e" / "curve.jsonl")] for run in (parts, whole)]
    assert curves[0] == curves[1]
    summaries = [json.loads((run_dir / "e2e" / "summary.json").read_text()) for run_dir in (parts, whole)]
    assert summaries[0]["rollouts"] == summaries[1]["rollouts"] > 0


def test_exports_the_best_watched_step(server: Server) -> None:
    run_dir, short = server.folder / "best", server.folder / "best-short"
    held_out = "trajectories.validation_fraction=0.5"
    assert all(server.run(folder, held_out, stage="turns") == 0 for folder in (run_dir, short)), server.said()
    watched = (*EPISODES, held_out, "watch.every=1", "watch.tasks=4", "watch.split=validation")
    watched = (*watched, "checkpoint.keep_every=null")
    chosen = (*watched, "watch.export_best=true")
    at = {"event": "train", "number": 5, "do": "KILL"}
    assert server.run(run_dir, *chosen, stage="e2e", at=at) == -9, server.said()
    assert server.run(run_dir, *chosen, stage="e2e") == 0, server.said()
    curve = {row["step"]: row["success"] for row in read_jsonl(run_dir / "e2e" / "curve.jsonl")}
    best = max(range(1, STEPS + 1), key=lambda step: (curve[step], step))
    assert best < STEPS, f"{curve}: the last step would be exported anyway"
    assert f"exports step {best} of {STEPS}" in server.said()
    assert json.loads((run_dir / "e2e" / "summary.json").read_text())["exported_step"] == best
    assert not (run_dir / "e2e" / "state").exists()  # it was kept to be exported alone
    assert server.run(short, *watched, f"end_to_end.steps={best}", stage="e2e") == 0, server.said()
    weights = [folder / "e2e" / "checkpoint" / "model.safetensors" for folder in (run_dir, short)]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_profile_and_evaluation_stop_and_go_on(server: Server, straight: Path) -> None:
    run_dir = server.new("others")
    shutil.rmtree(run_dir / "profile")
    overrides = ("generation.max_sequences=1", "evaluate.policies=[base,pivotrl]")
    at = {"event": "generate", "number": 2, "do": "TERM"}
    assert server.run(run_dir, *overrides, stage="profile", at=at) == EXIT_STOPPED, server.said()
    made = (run_dir / "profile" / "rollouts.jsonl").read_bytes()
    assert made.count(b"\n") >= 2
    assert server.run(run_dir, *overrides, stage="profile") == 0, server.said()
    assert (run_dir / "profile" / "rollouts.jsonl").read_bytes().startswith(made)
    shutil.copytree(straight / "train", run_dir / "train")
    overrides = (*overrides, "environment.max_turns=2", "evaluate.trials=2")

    def measured() -> dict[str, Any]:
        found: dict[str, Any] = json.loads((run_dir / "evaluate" / "measured.json").read_text())["policies"]
        return found

    at = {"event": "generate", "number": 4, "do": "KILL"}  # two turns of greedy episodes, then within the sampled ones
    assert server.run(run_dir, *overrides, stage="evaluate", at=at) == -9, server.said()
    greedy = measured()["base"]["greedy"]
    assert list(measured()["base"]) == ["greedy"]
    at = {"event": "refit", "number": 1, "do": "USR1"}  # base is measured, pivotrl comes next
    assert server.run(run_dir, *overrides, stage="evaluate", at=at) == EXIT_STOPPED, server.said()
    assert {policy: list(parts) for policy, parts in measured().items()} == {"base": ["greedy", "sampled"]}
    assert measured()["base"]["greedy"] == greedy
    before = measured()["base"]
    assert server.run(run_dir, *overrides, stage="evaluate") == 0, server.said()
    summary = json.loads((run_dir / "evaluate" / "summary.json").read_text())
    assert summary["policies"]["base"] == before
    assert list(summary["policies"]) == ["base", "pivotrl"]
    played = [(row["policy"], row["mode"]) for row in read_jsonl(run_dir / "evaluate" / "episodes.jsonl")]
    assert {key: played.count(key) for key in played} == {
        (policy, mode): count for policy in ("base", "pivotrl") for mode, count in (("greedy", 2), ("sampled", 4))
    }
    assert summary["rollouts"] == 2 * 2 * (2 + 4)  # policies, turns, episodes: none counted twice or forgotten
    assert not (run_dir / "evaluate" / "measured.json").exists()


def test_deadline_saves_before_it(server: Server, straight: Path) -> None:
    run_dir = server.new("deadline")
    assert server.run(run_dir, "checkpoint.stop_after_minutes=1e-6") == EXIT_STOPPED, server.said()
    assert "stopped (the deadline)" in server.said()
    env = {"SLURM_JOB_START_TIME": "1000", "SLURM_JOB_END_TIME": "4600"}  # long ago
    assert server.run(run_dir, env=env) == EXIT_STOPPED, server.said()
    assert server.run(run_dir, "checkpoint.stop_before_end_minutes=null", env=env) == 0, server.said()
    assert_same(run_dir, straight)


def test_clock_jump_changes_nothing(server: Server, straight: Path) -> None:
    run_dir = server.new("clock")
    at = {"event": "train", "number": 2, "do": "jump"}
    overrides = ("checkpoint.every_steps=2", "checkpoint.stop_after_minutes=60")
    assert server.run(run_dir, *overrides, at=at) == 0, server.said()
    assert_same(run_dir, straight)


def test_a_run_that_hangs_leaves_its_stacks(server: Server) -> None:
    run_dir = server.new("hang")
    at = {"event": "train", "number": 2, "do": "hang"}
    assert server.run(run_dir, "checkpoint.watchdog_minutes=0.15", at=at) == 3
    (stacks,) = (run_dir / "stacks").glob("*.rank-0.txt")
    assert "in event" in stacks.read_text()
    assert str(stacks) in server.said()


def interrupted(server: Server, name: str, stop: int = 2, **more: Any) -> Path:
    run_dir = server.new(name)
    at = {"event": "train", "number": stop, "do": "TERM"}
    assert server.run(run_dir, "checkpoint.every_steps=1", "checkpoint.keep_last=2", at=at, **more) == EXIT_STOPPED
    return run_dir


def test_another_configuration_is_refused_with_a_diff(server: Server, straight: Path) -> None:
    run_dir = interrupted(server, "config")
    assert server.run(run_dir, "algorithm.group_size=8", "seed=4") == 2
    assert "algorithm.group_size: 4 -> 8" in server.said()
    assert "seed: 0 -> 4" in server.said()
    assert server.run(run_dir, "algorithm.steps=1") == 2
    assert "algorithm.steps: 6 -> 1 (2 steps are done)" in server.said()
    pivots = run_dir / "select" / "pivots.jsonl"
    kept = pivots.read_text()
    drawn = next(iter(read_jsonl(run_dir / "train" / "rollouts.jsonl")))["turn_id"]
    pivots.write_text("".join(line for line in kept.splitlines(keepends=True) if json.loads(line)["turn_id"] != drawn))
    assert server.run(run_dir) == 2
    assert "pivots: " in server.said()
    pivots.write_text(kept)
    # benign: tracking, where it is saved, and the number of steps ahead
    overrides = ("tracking.name=other", "algorithm.steps=4", "checkpoint.every_minutes=1")
    assert server.run(run_dir, *overrides) == 0, server.said()
    assert rows(run_dir) == rows(straight)[:4]


def test_what_another_version_has_saved_goes_on_when_the_user_says_so(server: Server, straight: Path) -> None:
    run_dir = interrupted(server, "upgraded")
    for path in (run_dir / "train").rglob("sta[gt]e.json"):  # as of a version that had no such key
        saved = json.loads(path.read_text())
        del saved["config"]["algorithm.optimizer.beta1"]
        if path.name == "stage.json":
            saved["config"]["pivotrl"], saved["key"] = "0.0.9", "another"
        write_json(path, saved)
    assert server.run(run_dir) == 2
    assert "algorithm.optimizer.beta1: (absent) -> 0.9" in server.said()
    assert "run.accept_upgrade=true" in server.said()
    assert server.run(run_dir, "run.accept_upgrade=true") == 0, server.said()
    assert_same(run_dir, straight)


def test_damaged_checkpoints_are_named_and_older_ones_used(server: Server, straight: Path) -> None:
    run_dir = interrupted(server, "damaged", stop=3)
    newest, older = (run_dir / "train" / "state" / f"step-{n:08d}" for n in (3, 2))
    shard = newest / "__0_0.distcp"
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    spoilt = shutil.copytree(run_dir, server.folder / "spoilt")
    assert server.run(run_dir) == 0, server.said()
    assert "the checkpoint of step 3 is damaged (the content of __0_0.distcp has changed)" in server.said()
    assert "continues after step 2 of 6" in server.said()
    assert_same(run_dir, straight)
    (spoilt / "train" / "state" / older.name / "__0_0.distcp").write_bytes(b"short")
    book = json.loads((spoilt / "train" / "state" / newest.name / "state.json").read_text())
    book["files"]["../../../../model/config.json"] = [1, 1]
    write_json(spoilt / "train" / "state" / newest.name / "state.json", book)
    assert server.run(spoilt) == 2
    assert "step 3 is damaged ('../../../../model/config.json' is not the name of a file in it)" in server.said()
    assert "all checkpoints are damaged (steps 2, 3)" in server.said()
    assert "delete the folder" in server.said()


class Evil:
    def __reduce__(self) -> Any:
        return (os.mkdir, (os.environ["EVIL_MARK"],))


def test_nothing_untrusted_is_unpickled(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickles that would run code, in every file of a checkpoint, with checksums that fit them."""
    mark = tmp_path / "ran"
    monkeypatch.setenv("EVIL_MARK", str(mark))
    run_dir = interrupted(server, "evil")
    state = run_dir / "train" / "state" / "step-00000002"
    whole = shutil.copytree(state, tmp_path / "whole")
    for name in ("common.pt", ".metadata", "__0_0.distcp"):
        shutil.rmtree(state)
        shutil.copytree(whole, state)
        if name == "__0_0.distcp":
            pieces = DistReader(state).tensors["embedding.word_embeddings.weight"].pieces
            with (state / name).open("r+b") as file:
                file.seek(pieces[0].start)
                file.write(pickle.dumps(Evil()))
        else:
            (state / name).write_bytes(pickle.dumps(Evil()))
        book = json.loads((state / "state.json").read_text())
        book["files"][name] = list(checksum(state / name))
        write_json(state / "state.json", book)
        code = server.run(run_dir, env={"EVIL_MARK": str(mark)})
        assert not mark.exists(), name
        assert code == (0 if name == "common.pt" else 2), server.said()
        if name == "common.pt":  # nothing reads it
            run_dir = interrupted(server, "evil-again")
            state = run_dir / "train" / "state" / "step-00000002"
    with pytest.raises(UserError, match="cannot be read"):
        RegionReader(state).read("embedding.word_embeddings.weight", (49152, 32), (0, 0), (2, 32), True)
    pickle.loads(pickle.dumps(Evil()))
    assert mark.exists()  # it would have


def mount(path: Path, size: str, *flags: str) -> None:
    path.mkdir(exist_ok=True)
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", *flags, "tmpfs", str(path)], check=False)
    if done.returncode:
        pytest.skip("this machine lets nobody mount")


def test_full_disk_during_save_loses_nothing(server: Server, straight: Path) -> None:
    run_dir = server.new("full")
    at = {"event": "train", "number": 1, "do": "TERM"}
    assert server.run(run_dir, at=at) == EXIT_STOPPED
    disk = run_dir / "train" / "state"
    size = sum(p.stat().st_size for p in disk.rglob("*"))
    moved = shutil.move(disk, run_dir / "aside")
    mount(disk, str(int(1.5 * size)))
    try:
        shutil.copytree(moved, disk, dirs_exist_ok=True)
        # periodic saves fail and are told; the run goes on. The last step's would be kept, too.
        at = {"event": "train", "number": 4, "do": "TERM"}
        assert server.run(run_dir, "checkpoint.every_steps=1", at=at) == 2
        said = server.said()
        assert "the checkpoint of step 2 was not written" in said
        assert "No space left on device" in said
        assert "GiB are free); delete files, or lower checkpoint.keep_last" in said
        assert "step 5 could not be saved" in said
        assert "The same command continues after step 1" in said
        assert [p.name for p in disk.iterdir()] == ["step-00000001"]
        subprocess.run(["mount", "-o", f"remount,size={4 * size}", str(disk)], check=True)
        assert server.run(run_dir) == 0, server.said()
        assert_same(run_dir, straight)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_unwritable_directory_says_what_to_do(server: Server, straight: Path) -> None:
    run_dir = server.new("readonly")
    at = {"event": "startup", "number": 1, "do": "TERM"}
    assert server.run(run_dir, at=at) == EXIT_STOPPED
    disk = run_dir / "train" / "state"
    mount(disk, "1m")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    try:
        at = {"event": "train", "number": 2, "do": "TERM"}
        assert server.run(run_dir, at=at) == 2
        assert "Read-only file system; give this user access to it, or choose another run_dir" in server.said()
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)
    assert server.run(run_dir) == 0, server.said()
    assert_same(run_dir, straight)
