"""The order desk: simulated customer, tools and sizes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from outfitters_play import ENV, TRAIN, actions_of, call, play, say, tasks_of

from pivotrl.environments.argument_check import check_value
from pivotrl.environments.base import Task
from pivotrl.environments.outfitters import shop
from pivotrl.environments.registry import get_environment
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, ToolCall

# Customer


def test_the_customer_supplies_what_is_asked() -> None:
    for task in tasks_of("change_address"):
        user, request = task.spec["user"], task.spec["request"]
        answer = play(task, say("What is your order number?")).messages[-1]["content"]
        assert (request["order"] if user["knows_order"] else user["name"]) in answer
        assert user["name"] in play(task, say("What is your name?")).messages[-1]["content"]
        assert request["address"] in play(task, say("What is the new address?")).messages[-1]["content"]


def test_the_customer_agrees_to_its_wish_only() -> None:
    for task in tasks_of("return_items"):
        spec = task.spec
        order = spec["request"]["order"]
        wished = " and ".join(spec["request"]["items"])
        others = [sku for sku in spec["db"]["orders"][order]["items"] if sku not in spec["request"]["items"]]
        yes = play(task, say(f"I can return {wished} to store credit. OK?"))
        assert yes.customer.agreed
        assert "yes" in yes.messages[-1]["content"].lower()
        for text in (f"I can return {others[0]} to store credit. OK?", f"I can return {wished}. OK?", "Shall I?"):
            assert not play(task, say(text)).customer.agreed, text


def test_a_refusal_is_no_proposal() -> None:
    for task in tasks_of("refuse_status", "cancel"):
        episode = play(task, say(f"Sorry, I cannot cancel {task.spec['request']['order']}."))
        assert not episode.customer.agreed
        assert not episode.done


def test_the_customer_repeats_its_wish_after_nonsense() -> None:
    for task in TRAIN[:70]:
        episode = play(task, say("Bananas are yellow."))
        reply = episode.messages[-1]["content"]
        assert not episode.done
        request = task.spec["request"]
        if task.spec["user"]["knows_order"] and request.get("topic") != "stock":
            assert request["order"] in reply


def test_silence_malformed_and_wrong_calls_get_an_answer() -> None:
    task = tasks_of("cancel_order")[0]
    assert play(task, Action()).messages[-1] == {
        "role": "user",
        "content": play(task, Action()).messages[-1]["content"],
    }
    malformed = play(task, Action(text="<tool_call>{", problems=("unclosed tag",)))
    assert "unclosed tag" in malformed.messages[-1]["content"]
    order = task.spec["request"]["order"]
    half = Action(tool_calls=(ToolCall("cancel_order", {"order": order}),), problems=("second call not JSON",))
    episode = play(task, half)
    assert "error" in json.loads(episode.messages[-1]["content"])
    assert episode.state_hash() == ENV.reset(task, 3).state_hash()  # nothing was carried out
    for wrong in (
        call("fly"),
        call("get_order"),
        call("get_order", order=7),
        call("get_order", order="W0"),
        call("get_order", order=order, extra=1),
        call("get_stock", product="canoe"),
        call("return_items", order=order, items=[], to="card"),
        call("return_items", order=order, items=["hat-red-s"], to="cash"),
        Action(tool_calls=(ToolCall("get_order", ["W1"]),)),  # type: ignore[arg-type]
    ):
        assert list(json.loads(play(task, wrong).messages[-1]["content"])) == ["error"]


def test_several_calls_run_in_order() -> None:
    task = tasks_of("cancel_order")[0]
    order = task.spec["request"]["order"]
    cancel = ToolCall("cancel_order", {"order": order})
    episode = play(task, Action(tool_calls=(cancel, ToolCall("get_order", {"order": order}), cancel)))
    results = [json.loads(m["content"]) for m in episode.messages if m["role"] == "tool"]
    assert "refund" in results[0]
    assert results[1]["status"] == "cancelled"
    assert results[2] == {"error": "already cancelled"}


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
_NAMES = st.sampled_from([t["function"]["name"] for t in shop.TOOLS]) | st.text(max_size=8)


@st.composite
def _actions(draw: st.DrawFn, task: Task) -> Action:
    db = task.spec["db"]
    skus = [sku for order in db["orders"].values() for sku in order["items"]]
    plausible = {
        "order": st.sampled_from(list(db["orders"])),
        "name": st.sampled_from(list(db["customers"])),
        "product": st.sampled_from(list(db["stock"])),
        "items": st.lists(st.sampled_from(skus), max_size=3),
        "item": st.sampled_from(skus),
        "new_item": st.sampled_from([s for stock in db["stock"].values() for s in stock]),
        "to": st.sampled_from(["card", "credit"]),
        "address": st.text(max_size=10),
        "reason": st.sampled_from(shop.REASONS),
    }
    calls = []
    for _ in range(draw(st.integers(0, 3))):
        name = draw(_NAMES)
        tool = next((t["function"]["parameters"] for t in shop.TOOLS if t["function"]["name"] == name), None)
        if tool and draw(st.booleans()):
            arguments = {key: draw(plausible[key]) for key in tool["properties"]}
        else:
            arguments = draw(st.dictionaries(st.sampled_from([*plausible, "x"]), _JSON, max_size=3))
        calls.append(ToolCall(name, arguments))
    words = ["order", "number", "cancel", "return", "card", "?", "done", "W1", *skus, "yes", "sorry", "$12", "address"]
    text = draw(st.text(max_size=30) | st.lists(st.sampled_from(words), max_size=8).map(" ".join))
    return Action(text, draw(st.text(max_size=5)), tuple(calls), tuple(draw(st.lists(st.text(max_size=5), max_size=1))))


@settings(max_examples=300)
@given(data=st.data(), index=st.integers(0, 699))
def test_any_actions_are_answered(data: st.DataObject, index: int) -> None:
    task = TRAIN[index]
    before = json.dumps(task.spec)
    episode = ENV.reset(task, 5)
    while not episode.done:
        assert episode.messages[-1]["role"] in ("user", "tool")
        episode.step(data.draw(_actions(task)))
        assert len(episode.state_hash()) == 64
    assert episode.turns <= 5
    assert episode.outcome().reason != "unfinished"
    assert json.dumps(task.spec) == before  # an episode never writes into its task
    count = len(episode.messages)
    episode.step(Action("more"))
    assert len(episode.messages) == count


# Schemas, registry and size


@pytest.mark.parametrize(
    ("value", "schema", "fine"),
    [
        ("a", {"type": "string"}, True),
        ("", {"type": "string"}, False),
        (1, {"type": "string"}, False),
        (True, {"type": "integer"}, False),
        (1, {"type": "integer"}, True),
        (1.5, {"type": "integer"}, False),
        (1, {"type": "number"}, True),
        (True, {"type": "boolean"}, True),
        (["a"], {"type": "array", "items": {"type": "string"}}, True),
        (["a", 1], {"type": "array", "items": {"type": "string"}}, False),
        ("b", {"type": "string", "enum": ["a"]}, False),
        ({"a": "x"}, {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, True),
        ({}, {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}, False),
        ({"b": 1}, {"type": "object", "properties": {}}, False),
    ],
)
def test_argument_check(value: object, schema: dict[str, object], fine: bool) -> None:
    assert (check_value(value, schema, "x") is None) == fine


def test_tools_are_valid_json_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    for tool in shop.TOOLS:
        jsonschema.Draft202012Validator.check_schema(tool["function"]["parameters"])


def test_state_hash_is_canonical() -> None:
    db = TRAIN[0].spec["db"]
    turned = dict(reversed(list(db.items())))
    assert shop.state_hash(db) == shop.state_hash(turned)
    assert shop.state_hash(db) != shop.state_hash({**db, "transfers": ["no_stock"]})


def test_registry() -> None:
    assert get_environment("outfitters").name == "outfitters"
    with pytest.raises(UserError, match="outfitters"):
        get_environment("outfiters")


def test_prompts_and_actions_are_short() -> None:
    """Bounds in characters: 3 to a token is what such JSON takes, roughly."""
    tools = "\n".join(json.dumps(tool["function"], separators=(",", ":")) for tool in shop.TOOLS)
    assert (len(shop.POLICY) + len(tools)) / 3 < 700
    for task in TRAIN[:140]:
        trajectory = ENV.expert(task)
        dialogue = sum(len(json.dumps(m, separators=(",", ":"))) for m in trajectory.messages[1:])
        assert (dialogue + len(shop.POLICY) + len(tools)) / 3 < 1300
        for action in actions_of(trajectory):
            assert len(json.dumps([c.to_json() for c in action.tool_calls])) + len(action.text) < 180
