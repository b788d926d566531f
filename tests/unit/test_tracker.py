"""metrics.jsonl is always whole; wandb never ends a run. Progress lines."""

from __future__ import annotations

import io
import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from pivotrl.config import Tracking
from pivotrl.tracking import progress as progress_module
from pivotrl.tracking.metrics import Tracker
from pivotrl.tracking.progress import Lines, duration, progress

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
    def __init__(self, fail: str = "") -> None:
        super().__init__("wandb")
        self.fail, self.init_arguments, self.logged = fail, [], []
        self.Settings = dict

    def _maybe(self, what: str) -> None:
        if what == self.fail:
            raise ConnectionError(f"{what} broke\nmore")

    def init(self, **arguments: Any) -> FakeWandb:
        self._maybe("init")
        self.init_arguments.append(arguments)
        return self

    def define_metric(self, *a: Any, **k: Any) -> None:
        pass

    def log(self, row: dict[str, Any]) -> None:
        self._maybe("log")
        self.logged.append(row)

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


@pytest.mark.parametrize(("key", "mode"), [("", "offline"), ("secret", "online")])
def test_wandb_auto_mode_and_stable_id(key: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setenv("WANDB_API_KEY", key)
    for step in range(2):  # a run and its resumption
        with Tracker(tmp_path, Tracking(wandb="auto", name="mine"), "x", {"seed": 1}) as tracker:
            tracker.log(step, {"a": 1.0})
    first, second = fake.init_arguments
    assert first["mode"] == mode
    assert first["id"] == second["id"]
    assert (first["resume"], first["name"], first["dir"], first["config"]) == (
        "allow",
        "mine",
        str(tmp_path),
        {"seed": 1},
    )
    assert fake.logged == [{"step": 0, "a": 1.0}, {"step": 1, "a": 1.0}]


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
