from __future__ import annotations

import functools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_verifier_nemo_gym import ACTIONS
from test_verifier_search import shared_turns
from verifier_doubles import Scripted, act, call, tool, turn

from pivotrl.trajectories.schema import Action
from pivotrl.verifiers.audit import audit
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.mutations import BREAKING, EXPLOIT, PRESERVING, PROBE, exact, mutations
from pivotrl.verifiers.nemo_gym import SingleStepToolUse
from pivotrl.verifiers.nemo_gym_swe import SwePivot
from pivotrl.verifiers.runner import VerifierRunner
from pivotrl.verifiers.search import Search
from pivotrl.verifiers.similarity import Similarity

PAY = tool(
    "pay",
    ["account", "amount"],
    account={"type": "string"},
    amount={"type": "number"},
    kind={"type": "string", "enum": ["debit", "credit"]},
    urgent={"type": "boolean", "default": False},
    payee={"type": "string"},
)
TURN = turn(act(call("pay", account="acc_12", amount=1, kind="debit", payee="bob")), PAY, tool("ask"))
SPEECH = turn(act(text="Your payment of 5 dollars went out."), PAY, id="t#1")


class Fixed:
    name, version = "fixed", "1"

    def __init__(self, reward):
        self.reward = reward

    def config(self):
        return {}

    def verify(self, turn, action):
        return self.reward(turn, action) if callable(self.reward) else Verdict(self.reward, "fixed")


def by_kind(found):
    table: dict = {}
    for mutation in found:
        table.setdefault(mutation.kind, []).append(mutation)
    return table


def test_what_is_made_of_a_call():
    found = by_kind(mutations(TURN))
    arguments = {
        kind: [dict(m.action.tool_calls[0].arguments) for m in ms if m.action.tool_calls] for kind, ms in found.items()
    }
    original = TURN.demonstration.tool_calls[0].arguments
    assert list(arguments["key_order"][0]) == ["payee", "kind", "amount", "account"]
    assert arguments["defaults_written"] == [{**original, "urgent": False}]
    assert json.dumps(arguments["integer_as_float"][0]["amount"]) == "1.0"
    changed = [{k: v for k, v in a.items() if original[k] != v} for a in arguments["value_changed"]]
    assert changed == [{"account": "acc_17"}, {"amount": 2}, {"kind": "credit"}, {"payee": "bo7"}]
    assert {json.dumps(a["amount"]) for a in arguments["wrong_type"]} == {'"1"', "true"}
    assert [set(original) - set(a) for a in arguments["required_dropped"]] == [{"account"}, {"amount"}]
    assert arguments["values_swapped"] == [{**original, "kind": "bob", "payee": "debit"}]
    assert found["renamed_tool"][0].action.tool_calls[0].name == "ask"
    assert len(found["call_twice"][0].action.tool_calls) == 2
    assert arguments["emptied"] == arguments["right_name_no_arguments"] == [{}]
    assert arguments["common_prefix"][0]["account"] == "acc"
    assert found["malformed"][0].action.problems
    assert found["copy_of_prompt"][0].action.text == "Please do it."
    assert "calls_reversed" not in found


def test_what_is_made_of_speech_and_of_two_calls():
    kinds = by_kind(mutations(SPEECH))
    assert {"outer_white_space", "other_text", "called_instead", "common_prefix", "empty"} <= set(kinds)
    two = turn(act(call("f", x=1), call("g", y=[1, 2])), tool("f"), tool("g"))
    kinds = by_kind(mutations(two))
    assert [c.name for c in kinds["calls_reversed"][0].action.tool_calls] == ["g", "f"]
    assert [len(m.action.tool_calls) for m in kinds["call_left_out"]] == [1, 1]


@given(ACTIONS)
def test_no_mutation_is_the_demonstration(demonstration):
    t = turn(demonstration, PAY, tool("bash"))
    original = exact(demonstration)
    for mutation in mutations(t):
        if mutation.effect in (BREAKING, EXPLOIT):
            assert exact(mutation.action) != original
        assert t.demonstration == demonstration


def test_rates_and_examples():
    same = audit([TURN, SPEECH], Fixed(1.0))
    assert (same.false_negative_rate, same.false_positive_rate) == (0.0, 1.0)
    assert {k.kind for k in same.paying_exploits} >= {"empty", "spam_of_calls", "copy_of_prompt", "common_prefix"}
    nothing = audit([TURN, SPEECH], Fixed(0.0), examples=1)
    assert (nothing.false_negative_rate, nothing.false_positive_rate) == (1.0, 0.0)
    assert not nothing.paying_exploits
    row = next(k for k in nothing.kinds if k.kind == "demonstration")
    assert (row.tried, row.rejected, len(row.examples)) == (2, 2, 1)
    assert row.examples[0]["turn_id"] == "t#0"
    unknown = audit([TURN], Fixed(None))
    assert (unknown.false_negative_rate, unknown.unscorable_rate) == (None, 1.0)
    raising = audit([TURN], Fixed(lambda *_: 1 / 0))
    assert raising.unscorable_rate == 1.0
    json.dumps(same.to_json())
    assert "| key_order | preserving |" in same.table()
    assert "FP 100.00%" in same.table()
    with pytest.raises(ValueError, match="accept_at"):
        audit([], Fixed(1.0), accept_at=0.0)
    assert audit([], Fixed(1.0)).false_positive_rate is None


def test_execution_overrides_the_label():
    report = audit([TURN], Fixed(1.0), truth=lambda turn, action: bool(action.tool_calls))
    effects = {(k.kind, k.effect) for k in report.kinds}
    assert ("value_changed", PRESERVING) in effects
    assert ("empty", EXPLOIT) in effects
    assert report.false_positive_rate == 1.0
    assert not any(k.effect == BREAKING and k.kind == "value_changed" for k in report.kinds)


def test_what_a_text_tells_is_changed_value_by_value():
    told = turn(Action("1. Send W12 and W12, not 3.50?\n2. Pay 7 dollars."), tool("f"))
    kinds = by_kind(mutations(told))
    assert [m.action.text for m in kinds["told_value_changed"]] == [
        "1. Send W13 and W13, not 3.50?\n2. Pay 7 dollars.",
        "1. Send W12 and W12, not 4.50?\n2. Pay 7 dollars.",
        "1. Send W12 and W12, not 3.51?\n2. Pay 7 dollars.",
        "1. Send W12 and W12, not 3.50?\n2. Pay 8 dollars.",
    ]
    assert "told_value_changed" not in by_kind(mutations(turn(Action("No number."))))
    many = turn(Action(" ".join(map(str, range(10, 30)))))
    assert len(by_kind(mutations(many))["told_value_changed"]) == 5


def test_execution_that_does_not_read_texts_is_shown():
    """It finds no difference between two values told: that label stays, and the verdict is wrong."""
    told = turn(Action("It is W12."), tool("f"))
    report = audit([told], Fixed(1.0), truth=lambda turn, action: True, only_truth=True)
    wrong = {k.kind for k in report.kinds if k.effect in (BREAKING, EXPLOIT)}
    assert wrong == {"told_value_changed", "invented_value"}
    assert report.false_positive_rate == 1.0


def test_the_audit_tells_verifiers_apart():
    gym = audit([TURN, SPEECH], SingleStepToolUse({}))
    wrong = {k.kind for k in gym.kinds if k.effect == PRESERVING and k.rejected}
    assert wrong == {"defaults_written", "integer_as_float"}
    assert {k.kind for k in gym.paying_exploits} == {
        "agreeable_text",
        "common_prefix",
        "copy_of_prompt",
        "demonstration_and_spam",
        "invented_value",
        "spam_of_copies",
    }
    bash = turn(
        act(call("bash", command="pytest -q")), tool("bash", ["command"], command={"type": "string"}), tool("ls")
    )
    pays = {k.kind for k in audit([bash], SwePivot({})).paying_exploits}
    assert {"right_name_no_arguments", "spam_of_copies", "demonstration_and_spam"} <= pays
    dense = audit([bash], Similarity({}))
    assert "common_prefix" in {k.kind for k in dense.paying_exploits}


def test_search_on_the_shared_turns():
    report = audit(shared_turns(), Search({}))
    assert report.turns > 50
    assert report.false_negative_rate == 0.0
    assert report.false_positive_rate is not None
    assert report.false_positive_rate < 0.01, report.table()


def test_shell_and_edit_verdicts_on_mutated_shared_turns(shared_data, capsys):
    """The table of the docs, of a few turns: nothing that does the same is rejected, nothing else accepted."""
    from benchmarks.verifier_mutations import main

    assert main(["--turns", "40", "--json"]) == 0, capsys.readouterr().out
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures == {"turns": {"terminal": 40, "swe": 40}, "wrong": 0, "raised": 0}


def test_the_order_of_commands_is_no_matter_of_writing():
    two = [turn(act(call(name, command="a"), call(name, command="b"))) for name in ("bash", "pay")]
    kinds = [{m.kind: m.effect for m in mutations(one)} for one in two]
    assert [kind["calls_reversed"] for kind in kinds] == [PROBE, PRESERVING]


def test_in_workers():
    with VerifierRunner(Scripted, workers=1, timeout_seconds=20) as runner:
        report = audit([TURN], runner)
        assert runner.metrics()["pairs"] == sum(k.tried for k in report.kinds)
    assert report.verifier["name"] == "scripted"
    assert functools.reduce(lambda a, k: a + k.accepted, report.kinds, 0) > 0


@given(st.text())
def test_total_on_any_text(text):
    t = turn(Action(text=text))
    assert all(m.action.text is not None for m in mutations(t))
