"""metrics.jsonl is always whole; wandb never ends a run. Progress lines."""

from __future__ import annotations

import io
import json
import math
import struct
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from pivotrl.config import Tracking
from pivotrl.errors import UserError
from pivotrl.io import append_jsonl, write_json, write_jsonl
from pivotrl.tracking import progress as progress_module
from pivotrl.tracking.metrics import Table, Tracker
from pivotrl.tracking.progress import Lines, duration, progress
from pivotrl.tracking.sinks import Background, Entry

DISABLED = Tracking(wandb="disabled")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_one_flushed_line_a_step(tmp_path: Path) -> None:
    with Tracker(tmp_path, DISABLED, "x") as tracker:
        tracker.log(0, {"loss": 1.5, "text": "日本"})
        assert rows(tmp_path) == [{"step": 0, "loss": 1.5, "text": "日本"}]  # before it is closed
        tracker.log(1, {"loss": 1})
    assert [r["step"] for r in rows(tmp_path)] == [0, 1]


def test_what_is_not_json_still_shows(tmp_path: Path) -> None:
    class Tensor:
        def item(self) -> float:
            return 2.5

    with Tracker(tmp_path, DISABLED, "x") as tracker:
        tracker.log(0, {"nan": math.nan, "inf": -math.inf, "tensor": Tensor(), "list": [math.nan, 1]})
    assert rows(tmp_path) == [{"step": 0, "nan": "nan", "inf": "-inf", "tensor": 2.5, "list": ["nan", 1]}]


def test_torn_line_of_a_killed_writer_is_cut_and_resume_drops_what_is_done_again(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n{"step": 2}\n{"st')
    with Tracker(tmp_path, DISABLED, "x", start_step=2) as tracker:
        tracker.log(2, {"again": True})
    assert rows(tmp_path) == [{"step": 0}, {"step": 1}, {"step": 2, "again": True}]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    with Tracker(tmp_path / "x", DISABLED, "x", enabled=False) as tracker:
        tracker.log(0, {"a": 1})
    assert not (tmp_path / "x").exists()


def test_without_wandb_installed_one_warning_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with Tracker(tmp_path, Tracking(wandb="auto"), "x") as tracker:
        for step in range(3):
            tracker.log(step, {"a": step})
    assert len(rows(tmp_path)) == 3
    assert capsys.readouterr().err.count("wandb is off") == 1


class FakeWandb(types.ModuleType):
    def __init__(self, fail: str = "", step: int = 0) -> None:
        super().__init__("wandb")
        self.fail, self.step = fail, step
        self.init_arguments: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.Settings = dict
        self.Table = lambda columns, data: (columns, data)

    def _maybe(self, what: str) -> None:
        if what == self.fail:
            raise ConnectionError(f"{what} broke\nmore")

    def init(self, **arguments: Any) -> FakeWandb:
        self.init_arguments.append(arguments)
        self._maybe("init")
        if arguments["mode"] == "online":
            self._maybe("connect")
        return self

    def define_metric(self, *a: Any, **k: Any) -> None:
        pass

    def log(self, row: dict[str, Any], step: int) -> None:
        self._maybe("log")
        self.logged.append((step, row))

    def finish(self) -> None:
        self._maybe("finish")


@pytest.mark.parametrize("where", ["init", "log", "finish"])
def test_failing_wandb_is_switched_off_once(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", FakeWandb(where))
    with Tracker(tmp_path, Tracking(wandb="online"), "x") as tracker:
        for step in range(3):
            tracker.log(step, {"a": step})
    assert len(rows(tmp_path)) == 3
    text = capsys.readouterr().err
    assert text.count("wandb is off") == 1
    assert f"{where} broke" in text


def test_without_a_connection_the_run_is_kept_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeWandb("connect")
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with Tracker(tmp_path, Tracking(wandb="online"), "x") as tracker:
        tracker.log(0, {"a": 1})
    assert [a["mode"] for a in fake.init_arguments] == ["online", "offline"]
    assert fake.init_arguments[0]["id"] == fake.init_arguments[1]["id"]
    assert fake.logged == [(0, {"step": 0, "a": 1})]
    said = capsys.readouterr().err
    assert f"wandb sync {tmp_path}/wandb/offline-run-*" in said
    assert "wandb is off" not in said


class Hanging:
    """A sink whose network has died."""

    name = "hanging"

    def __init__(self, where: str) -> None:
        self.where, self.release, self.gave_up = where, threading.Event(), False

    def _maybe(self, where: str) -> None:
        if self.where == where:
            self.gave_up = not self.release.wait(120)

    def open(self) -> None:
        self._maybe("open")

    def write(self, entry: Entry) -> None:
        self._maybe("write")

    def close(self) -> None:
        self._maybe("close")


@pytest.mark.parametrize("where", ["open", "write", "close"])
def test_a_dead_network_never_holds_a_run_up(where: str) -> None:
    told: list[str] = []
    sink = Hanging(where)
    background = Background(sink, lambda name, what, error: told.append(what))
    for step in range(2000):  # more than may wait
        background.put(Entry(step, {}))
    background.close(seconds=0.2)
    assert not sink.gave_up  # the run went on while the network hung
    assert told[-1] == "finish"
    assert told.count("keep up") <= 1
    sink.release.set()


@pytest.mark.parametrize(("key", "mode"), [("", "offline"), ("secret", "online")])
def test_wandb_auto_mode_and_stable_id(key: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_API_KEY", key)
    folder = tmp_path / "airline" / "train"
    for step in range(2):  # a run and its resumption
        with Tracker(folder, Tracking(wandb="auto"), "train", {"seed": 1}) as tracker:
            tracker.log(step, {"a": 1.0})
    first, second = fake.init_arguments
    assert first["mode"] == mode
    assert first["id"] == second["id"]
    wanted = {"resume": "allow", "name": "airline-train", "group": "airline", "dir": str(folder), "config": {"seed": 1}}
    assert {key: first[key] for key in wanted} == wanted
    assert fake.logged == [(0, {"step": 0, "a": 1.0}), (1, {"step": 1, "a": 1.0})]
    assert "secret" not in "".join(p.read_text() for p in folder.iterdir() if p.is_file())


def test_steps_only_grow_across_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed after step 4, resumed from a checkpoint after step 2: wandb gets each step once."""
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    for steps in (range(5), range(2, 7)):
        with Tracker(tmp_path, Tracking(wandb="offline"), "x", start_step=steps[0]) as tracker:
            for step in steps:
                tracker.log(step, {})
    assert [step for step, _ in fake.logged] == list(range(7))
    assert [r["step"] for r in rows(tmp_path)] == list(range(7))
    fake.step = 9  # the server knows more than this folder does
    with Tracker(tmp_path, Tracking(wandb="online"), "x", start_step=7) as tracker:
        for step in range(7, 11):
            tracker.log(step, {})
    assert [step for step, _ in fake.logged][7:] == [9, 10]


def test_tables_go_to_wandb_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    with Tracker(tmp_path, Tracking(wandb="offline"), "x") as tracker:
        tracker.log(0, {"a": 1}, {"rollouts": Table(("turn", "reward"), [("t#0", 1.0), ("t#0", None)])})
    assert rows(tmp_path) == [{"step": 0, "a": 1}]
    assert fake.logged[0][1]["rollouts"] == (["turn", "reward"], [["t#0", 1.0], ["t#0", None]])


def test_only_the_first_of_several_processes_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with Tracker(tmp_path / "x", Tracking(wandb="offline"), "x") as tracker:
        tracker.log(0, {"a": 1})
    write_json(tmp_path / "a.json", 1)
    write_jsonl(tmp_path / "b.jsonl", [1])
    append_jsonl(tmp_path / "c.jsonl", [1])
    write_json(tmp_path / "own.json", 1, every_rank=True)
    assert [p.name for p in tmp_path.iterdir()] == ["own.json"]


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    settings = Tracking(wandb="disabled", tensorboard=True)
    for steps in (range(3), range(1, 4)):
        with Tracker(tmp_path, settings, "x", start_step=steps[0]) as tracker:
            for step in steps:
                tracker.log(step, {"loss": step / 2, "note": "text", "nan": math.nan})
    found: list[tuple[int, str, float]] = []
    for path in sorted((tmp_path / "tensorboard").iterdir()):
        found += scalars(path.read_bytes())
    # a viewer hides what was logged of steps >= 1 before the second start; text and what is no number is left out
    assert found == [(s, "loss", s / 2) for s in (0, 1, 2, 1, 2, 3)]


def scalars(data: bytes) -> list[tuple[int, str, float]]:
    """(step, tag, value) of an event file: records of length, checksum, event, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found, at = [], 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        event = Event.FromString(data[at + 12 : at + 12 + length])
        found += [(event.step, v.tag, v.simple_value) for v in event.summary.value]
        at += length + 16
    return found


def test_tensorboard_that_is_not_installed_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(UserError, match=r"pip install 'pivotrl\[tensorboard\]'"):
        Tracker(tmp_path, Tracking(wandb="disabled", tensorboard=True), "x")


def test_the_real_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own API takes what we give it: tables, steps, settings; a second start goes on with the same run."""
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_API_KEY", "")
    for step in range(2):
        with Tracker(tmp_path, Tracking(wandb="auto"), "x", {"seed": 1}, start_step=step) as tracker:
            tracker.log(step, {"loss": 1.5}, {"rollouts": Table(("turn", "reward"), [("t#0", 1.0)])})
    runs = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(runs) == 2
    assert len({run.name.rpartition("-")[2] for run in runs}) == 1
    assert all(run.glob("*.wandb") for run in runs)
    assert (tmp_path / "wandb_next_step").read_text() == "2\n"


def test_lines_tell_share_speed_and_what_is_left_every_ten_seconds() -> None:
    now, out = [0.0], io.StringIO()
    lines = Lines(100, "profile", done=20, unit="turn", file=out, clock=lambda: now[0])
    for second in range(1, 25):
        now[0] = float(second)
        lines.advance(1, note=f"mean {second / 100}")
    lines.finish()
    lines.finish()
    told = out.getvalue().splitlines()
    assert told == [
        "profile: 30/100 turn (30 %), 1 turn/s, 1 min 10 s left, mean 0.1",
        "profile: 40/100 turn (40 %), 1 turn/s, 1 min 00 s left, mean 0.2",
        "profile: 44/100 turn (44 %), 1 turn/s, 56.0 s left, mean 0.24",
    ]


def test_progress_on_a_terminal_is_a_bar_and_elsewhere_lines() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    plain, terminal = io.StringIO(), Terminal()
    for out in (plain, terminal):
        with progress(3, "train", file=out) as bar:
            for _ in range(3):
                bar.advance(1, note="ok")
    assert plain.getvalue().startswith("train: 3/3 it (100 %)")
    assert "3/3" in terminal.getvalue()
    with progress(0, "none", file=plain), progress(1, "off", file=plain, enabled=False):
        pass
    assert "off" not in plain.getvalue()
    assert progress_module.Lines(0, "x", file=plain).total == 0


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (59.94, "59.9 s"), (125, "2 min 05 s"), (11_220, "3 h 07 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
