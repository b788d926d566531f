from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from verifier_doubles import CannotStart, DiesAtStart, IgnoresThinking, Scripted, act, turn

from pivotrl.errors import UserError
from pivotrl.verifiers.runner import VerifierRunner
from pivotrl.verifiers.worker_process import descendants

TURN = turn(act(text="ok"))


def pairs(*texts: str):
    return [(TURN, act(text=text)) for text in texts]


def running(pids: set[int]) -> set[int]:
    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return {pid for pid in pids if alive(pid)}


def rewards(verdicts):
    return [(v.reward, v.reason) for v in verdicts]


@pytest.mark.parametrize("workers", [0, 2])
def test_order_errors_and_rewards_that_are_none(workers):
    texts = ["a", "raise", "return Verdict(nan, 'x')", "return Verdict(inf, 'x')", "return Verdict(1.5, 'x')"]
    texts += [
        "return Verdict(-1, 'x')",
        "return Verdict('1', 'x')",
        "return Verdict(True, 'x')",
        "return None",
        "return 1",
    ]
    texts += ["return Verdict(None, 'judge_down')", "return Verdict(0, 'wrong')", "print", "b"]
    with VerifierRunner(Scripted, workers, timeout_seconds=20) as runner:
        got = rewards(runner.score(pairs(*texts)))
        counts = runner.metrics()
    assert got == [(1.0, "match"), (None, "verifier_error")] + [(None, "invalid_reward")] * 8 + [
        (None, "judge_down"),
        (0.0, "wrong"),
        (1.0, "match"),
        (1.0, "match"),
    ]
    assert counts["unscorable/invalid_reward"] == 8
    assert counts["pairs"] == len(texts)
    assert counts["scored"] == counts["calls"] + 1 == 4  # the sums of details["counts"] pass the process border


def test_a_hang_off_the_main_thread_costs_its_pair_alone():
    box = []
    before = descendants(os.getpid())

    def work():
        with VerifierRunner(Scripted, workers=2, timeout_seconds=1.0) as runner:
            runner.score(pairs("warm", "up"))
            started = time.monotonic()
            verdicts = runner.score(pairs("hang", *map(str, range(40)), "sleep"))
            box.append((verdicts, time.monotonic() - started, descendants(os.getpid()) - before))
        box.append(running(box[0][2]))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(120)
    (verdicts, seconds, _), left = box
    assert rewards(verdicts) == [(None, "timeout")] + [(1.0, "match")] * 40 + [(None, "timeout")]
    assert seconds < 41 * 1.0  # its limit is not paid once for every pair behind it
    assert not left


def test_hangs_hold_up_nobody_and_leave_no_process():
    before = descendants(os.getpid())
    turns = [turn(act(text="ok"), id=f"{i}#0") for i in range(14)]
    work = [(t, act(text="sleep")) for t in turns[:12]] + [(t, act(text="ok")) for t in turns[12:]]
    with VerifierRunner(Scripted, workers=2, timeout_seconds=3.0, max_stuck=12) as runner:
        started = time.monotonic()
        verdicts = runner.score(work)
        seconds = time.monotonic() - started
        assert runner.metrics()["workers_started"] >= 12
        assert runner.score(pairs("again"))[0].reward == 1.0
        left = descendants(os.getpid()) - before
        assert len(left) <= 2  # those past `workers` were dismissed
    assert rewards(verdicts) == [(None, "timeout")] * 12 + [(1.0, "match")] * 2
    assert seconds < 12 * 3.0 / 2  # 18 s where each waits for the one before; generous for the starts on a busy machine
    assert not running(left)


def test_a_hundred_hangs_leave_no_process_and_delay_nobody():
    """Every hang has its limit, all at once; the good pairs behind them do not wait for them one after another."""
    before = descendants(os.getpid())
    limit, hangs = 2.0, 100
    turns = [turn(act(text="ok"), id=f"{i}#0") for i in range(hangs + 20)]
    work = [(t, act(text="sleep" if i < hangs else "ok")) for i, t in enumerate(turns)]
    seen: set[int] = set()
    with VerifierRunner(Scripted, workers=2, timeout_seconds=limit) as runner:
        runner.score([(turn(act(text="ok"), id="warm#0"), act(text="warm"))])
        started = time.monotonic()
        verdicts = runner.score(work)
        seconds = time.monotonic() - started
        counts = runner.metrics()
        seen = descendants(os.getpid()) - before
    assert rewards(verdicts) == [(None, "timeout")] * hangs + [(1.0, "match")] * 20
    assert seconds < hangs * limit / 2 / 2  # two at a time would take 100 s; starting 100 interpreters takes the most
    assert counts["unscorable/timeout"] == hangs and counts["workers_killed"] >= hangs
    assert len(seen) <= 2 and not running(seen)
    assert not running(descendants(os.getpid()) - before)


def test_children_of_a_hung_verifier_die_with_it():
    before = descendants(os.getpid())
    with VerifierRunner(Scripted, workers=1, timeout_seconds=2.0) as runner:
        seen: set[int] = set()

        def watch():
            while not stop.wait(0.05):
                seen.update(descendants(os.getpid()) - before)

        stop = threading.Event()
        watcher = threading.Thread(target=watch)
        watcher.start()
        verdict = runner.score(pairs("children"))[0]
        stop.set()
        watcher.join()
        assert verdict.reason == "timeout"
        assert len(seen) >= 3  # the worker, the sleep and the daemon
        time.sleep(0.2)
        assert not running(seen)


def test_a_worker_that_dies_costs_one_pair():
    with VerifierRunner(Scripted, workers=1, timeout_seconds=20) as runner:
        verdicts = runner.score(pairs("a", "exit", "b", "c"))
    assert rewards(verdicts) == [(1.0, "match"), (None, "worker_died"), (1.0, "match"), (1.0, "match")]
    assert verdicts[1].details == {"exit": 7}


def test_cache_is_by_content_and_keeps_no_failure():
    other = turn(act(text="another"))
    with VerifierRunner(Scripted) as runner:
        runner.score([*pairs("a", "a", "raise", "raise"), (other, act(text="a"))])
        assert runner.metrics()["cache_hits"] == 2
        runner.score([*pairs("a", "raise"), (turn(act(text="ok")), act(text="a"))])  # an equal turn, another object
        assert runner.metrics()["cache_hits"] == 4  # "raise" ran again
        thought = act(text="a", thinking="hm")
        runner.score([(TURN, thought)])
        assert runner.metrics()["cache_hits"] == 4
    with VerifierRunner(IgnoresThinking) as runner:
        runner.score([(TURN, act(text="a")), (TURN, act(text="a", thinking="hm"))])
        assert runner.metrics()["cache_hits"] == 1


def test_json_types_are_not_one_content():
    with VerifierRunner(Scripted) as runner:
        from verifier_doubles import call

        runner.score([(TURN, act(call("f", x=value))) for value in (1, 1.0, True, "1")])
        assert runner.metrics()["cache_hits"] == 0


@pytest.mark.parametrize("workers", [0, 1])
def test_an_action_nested_too_deep_does_not_stop_the_batch(workers):
    from verifier_doubles import call

    deep: list = []
    for _ in range(100_000):
        deep = [deep]
    with VerifierRunner(Scripted, workers, timeout_seconds=20) as runner:
        verdicts = runner.score([(TURN, act(text="a")), (TURN, act(call("f", x=deep))), (TURN, act(text="b"))])
    assert [v.reward for v in verdicts][::2] == [1.0, 1.0]
    assert verdicts[1].reward == (None if workers else 1.0)


def test_what_cannot_work_says_so(monkeypatch):
    monkeypatch.setenv("VERIFIER_TEST_PARENT", str(os.getpid()))
    with pytest.raises(UserError, match="workers=0"):
        VerifierRunner(lambda: Scripted(), workers=1)
    with pytest.raises(UserError, match="time-out"):
        VerifierRunner(Scripted, timeout_seconds=0)
    with VerifierRunner(CannotStart, workers=1) as runner, pytest.raises(UserError, match="no such file"):
        runner.score(pairs("a"))
    with VerifierRunner(DiesAtStart, workers=1) as runner, pytest.raises(RuntimeError, match="exit 3"):
        runner.score(pairs("a"))
    runner = VerifierRunner(Scripted)
    runner.close()
    with pytest.raises(RuntimeError, match="closed"):
        runner.score(pairs("a"))


def test_workers_do_not_outlive_a_killed_parent():
    script = (
        "import os, sys, threading, time\n"
        "from verifier_doubles import Scripted, act, turn\n"
        "from pivotrl.verifiers.runner import VerifierRunner\n"
        "runner = VerifierRunner(Scripted, workers=2, timeout_seconds=600)\n"
        "t = turn(act(text='ok'))\n"
        "runner.score([(t, act(text='a'))])\n"
        "work = [(t, act(text='hang'))]\n"
        "threading.Thread(target=runner.score, args=(work,), daemon=True).start()\n"
        "time.sleep(0.5)\n"
        "print('busy', flush=True)\n"
        "time.sleep(600)\n"
    )
    path = os.pathsep.join([os.getcwd(), str(Path(__file__).parent)])
    parent = subprocess.Popen(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == "busy\n"
    below = descendants(parent.pid)
    assert below
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 5
    while running(below) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(below)
