from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pivotrl.config import VerifierConfig
from pivotrl.environments.registry import get_environment
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, ToolCall, Turn
from pivotrl.trajectories.turns import split_turns
from pivotrl.verifiers.execution import ExecutionVerifier
from pivotrl.verifiers.registry import get_verifier

SETTINGS = VerifierConfig("execution", {"environment": "outfitters"})


def turns(count: int = 70) -> list[Turn]:
    environment = get_environment("outfitters")
    trajectories = [environment.expert(task, 0) for task in environment.tasks("train", count, 3)]
    return [t for trajectory in trajectories for t in split_turns(trajectory, "train") if isinstance(t, Turn)]


TURNS = turns()
VERIFIER = get_verifier(SETTINGS)


def test_every_demonstration_scores_one():
    assert {VERIFIER.verify(t, t.demonstration).reward for t in TURNS} == {1.0}
    assert any(not t.demonstration.tool_calls for t in TURNS)  # texts too


def test_other_words_that_do_the_same_score_one():
    asks = next(t for t in TURNS if "Go ahead?" in t.demonstration.text)
    assert VERIFIER.verify(asks, Action(asks.demonstration.text.replace("Go ahead?", "Shall I?"))).reward == 1.0


def test_empty_and_unrelated_texts_score_zero():
    texts = [t for t in TURNS if not t.demonstration.tool_calls]
    for text in ("", "Hello!", "lorem ipsum dolor"):
        assert sum(VERIFIER.verify(t, Action(text)).reward or 0 for t in texts) <= 0.02 * len(texts), text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda a: Action("Sure."), "spoke_instead_of_calling"),
        (lambda a: Action(problems=("broken",)), "malformed"),
        (lambda a: replace(a, tool_calls=(*a.tool_calls, *a.tool_calls)), "wrong_tool"),
        (lambda a: Action(tool_calls=(ToolCall("no_such_tool", {}),)), "wrong_tool"),
        (lambda a: Action(tool_calls=(ToolCall("get_order", {"order": "W0000"}),)), "call_failed"),
    ],
)
def test_other_actions_score_zero(change, reason):
    turn = next(t for t in TURNS if [c.name for c in t.demonstration.tool_calls] == ["get_order"])
    verdict = VERIFIER.verify(turn, change(turn.demonstration))
    assert (verdict.reward, verdict.reason) == (0.0, reason)


def test_a_write_elsewhere_is_another_state():
    turn = next(t for t in TURNS if [c.name for c in t.demonstration.tool_calls] == ["return_items"])
    call = turn.demonstration.tool_calls[0]
    other = {"card": "credit", "credit": "card"}[call.arguments["to"]]
    action = Action(tool_calls=(ToolCall("return_items", {**call.arguments, "to": other}),))
    assert VERIFIER.verify(turn, action).reward == 0.0


def test_order_of_a_set_does_not_matter():
    turn = next(
        t
        for t in TURNS
        if len(t.demonstration.tool_calls[:1]) and len(t.demonstration.tool_calls[0].arguments.get("items", [])) > 1
    )
    call = turn.demonstration.tool_calls[0]
    action = Action(tool_calls=(ToolCall(call.name, {**call.arguments, "items": call.arguments["items"][::-1]}),))
    assert VERIFIER.verify(turn, action).reward == 1.0


def test_edited_or_foreign_states_are_unscorable():
    turn = next(t for t in TURNS if t.depth > 0)
    edited = [{**m, "content": m["content"] + "x"} if m["role"] == "user" else m for m in turn.messages]
    for broken in (replace(turn, messages=edited, id="e"), replace(turn, task_id="nowhere-1", id="f")):
        verdict = VERIFIER.verify(broken, broken.demonstration)
        assert (verdict.reward, verdict.reason) == (None, "not_replayable")


def test_options():
    for options in ({}, {"environment": "outfitters", "fast": True}, {"environment": "outfiters"}):
        with pytest.raises(UserError):
            ExecutionVerifier(options)
    assert VERIFIER.config() == {
        "environment": "outfitters",
        "environment_version": get_environment("outfitters").version,
    }


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8), lambda x: st.lists(x, max_size=2)
)
calls = st.builds(
    ToolCall,
    st.sampled_from(["get_order", "return_items", "zz"]),
    st.dictionaries(st.sampled_from(["order", "items", "to", "zz"]), values),
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow])
@given(st.sampled_from(TURNS), st.text(max_size=40), st.lists(calls, max_size=3))
def test_total(turn, text, made):
    verdict = VERIFIER.verify(turn, Action(text, tool_calls=tuple(made)))
    assert verdict.reward in (0.0, 1.0)
    assert verdict.reason not in ("verifier_error", "invalid_reward")
