"""The order desk: tasks, expert, simulated customer and judge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pivotrl.environments.argument_check import check_value
from pivotrl.environments.base import Task
from pivotrl.environments.outfitters import Outfitters, rules, shop
from pivotrl.environments.outfitters.episode import OutfittersEpisode
from pivotrl.environments.outfitters.tasks import FAMILIES
from pivotrl.environments.registry import get_environment
from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, ToolCall, Trajectory

ENV = Outfitters()
TRAIN = ENV.tasks("train", 700)


def say(text: str) -> Action:
    return Action(text=text)


def call(tool: str, /, **arguments: object) -> Action:
    return Action(tool_calls=(ToolCall(tool, arguments),))


def tasks_of(family: str, kind: str | None = None) -> list[Task]:
    return [t for t in TRAIN if t.family == family and kind in (None, t.spec["request"]["kind"])]


def play(task: Task, *actions: Action, max_turns: int = 12) -> OutfittersEpisode:
    episode = ENV.reset(task, max_turns)
    for action in actions:
        episode.step(action)
    return episode


def actions_of(trajectory: Trajectory) -> list[Action]:
    rows = [m for m in trajectory.messages if m["role"] == "assistant"]
    return [
        Action(m.get("content", ""), "", tuple(ToolCall(c["name"], c["arguments"]) for c in m.get("tool_calls", ())))
        for m in rows
    ]


def swap_write(task: Task, change: dict[str, object]) -> OutfittersEpisode:
    """The expert's episode, with arguments of its write changed."""
    actions = []
    for action in actions_of(ENV.expert(task)):
        calls = tuple(
            ToolCall(c.name, {**c.arguments, **change}) if c.name in shop.WRITES else c for c in action.tool_calls
        )
        actions.append(Action(action.text, "", calls))
    return play(task, *actions, say("Bye."))  # where the expert's words no longer fit, the customer asks once more


# Tasks


def test_families_have_equal_shares_and_a_prefix_is_stable() -> None:
    shares = Counter(task.family for task in TRAIN)
    assert shares == dict.fromkeys(FAMILIES, 100)
    assert ENV.tasks("train", 30) == TRAIN[:30]
    assert len({task.id for task in TRAIN}) == len(TRAIN)


def test_train_and_test_share_nothing_that_could_be_learned_by_heart() -> None:
    test = ENV.tasks("test", 700)
    train = [*TRAIN, *ENV.tasks("train", 350, seed=1)]

    def parts(tasks: list[Task], key: str) -> set[str]:
        return {name for task in tasks for name in task.spec["db"][key]}

    def addresses(tasks: list[Task]) -> set[str]:
        return {order["address"] for task in tasks for order in task.spec["db"]["orders"].values()}

    assert not parts(train, "orders") & parts(test, "orders")
    assert not parts(train, "customers") & parts(test, "customers")
    assert not addresses(train) & addresses(test)
    assert not {task.id for task in train} & {task.id for task in test}
    specs = [json.dumps(task.spec, sort_keys=True) for task in [*train, *test]]
    assert len(set(specs)) == len(specs)


def test_tasks_are_the_same_in_another_process() -> None:
    code = (
        "import json; from pivotrl.environments.outfitters import Outfitters as E; e = E(); t = e.tasks('test', 20, 3);"
        "print(json.dumps([[x.id, x.family, x.spec] for x in t] + [e.expert(t[4], 2).messages]))"
    )
    env = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    tasks = ENV.tasks("test", 20, 3)
    here = [[t.id, t.family, t.spec] for t in tasks] + [ENV.expert(tasks[4], 2).messages]
    assert json.loads(run.stdout) == json.loads(json.dumps(here))


def test_a_task_is_found_by_its_id_and_an_unknown_id_or_split_is_told() -> None:
    assert ENV.task(TRAIN[17].id) == TRAIN[17]
    for wrong in ("", "outfitters-train-0", "outfitters-dev-0-1", "other-train-0-1", "outfitters-train-x-1"):
        with pytest.raises(UserError, match="outfitters"):
            ENV.task(wrong)
    with pytest.raises(UserError, match="dev"):
        ENV.tasks("dev", 1)


def test_families_ask_for_what_their_names_say() -> None:
    writes = {task.family: Counter() for task in TRAIN}
    for task in TRAIN:
        right = rules.right_write(task.spec["db"], task.spec["request"])
        writes[task.family][right.name if right else None] += 1
        if task.family == "refuse_rules":
            assert right is not None
            assert right.arguments["reason"] in ("too_late", "no_stock")
        if task.family == "refuse_status":
            assert right is not None
            assert right.arguments["reason"] in ("not_pending", "not_delivered")
    for family in ("cancel_order", "return_items", "exchange_item", "change_address"):
        assert writes[family] == {family: 100}
    assert writes["answer_question"] == {None: 100}
    assert writes["refuse_status"] == writes["refuse_rules"] == {"transfer_to_human": 100}


def test_decisions_hang_on_the_data() -> None:
    """No constant choice does well: each side of each rule occurs in at least a quarter of the cases."""
    returns = [rules.right_write(t.spec["db"], t.spec["request"]).arguments["to"] for t in tasks_of("return_items")]
    exchanges = [t.spec for t in tasks_of("exchange_item")]
    first = [rules.right_write(s["db"], s["request"]).arguments["new_item"] == s["request"]["want"] for s in exchanges]
    middle = [
        t.family
        for t in TRAIN
        if t.spec["request"]["kind"] in ("return", "exchange")
        and 30 < (t.spec["db"]["orders"][t.spec["request"]["order"]]["days"] or 0) <= 60
    ]
    late = middle.count("refuse_rules") / len(middle)
    assert 0.25 < returns.count("card") / len(returns) < 0.75
    assert 0.25 < sum(first) / len(first) < 0.75
    assert 0.25 < late < 0.75


# Expert


def test_the_expert_succeeds_on_thousands_of_tasks() -> None:
    tasks = [*TRAIN, *ENV.tasks("test", 700, seed=5), *ENV.tasks("train", 700, seed=9)]
    turns = []
    for task in tasks:
        trajectory = ENV.expert(task, run=1)  # raises where its own outcome is not a success
        assert trajectory.meta == {"task_id": task.id, "reward": 1.0, "family": task.family}
        replayed = play(task, *actions_of(trajectory))
        assert replayed.outcome().reason == "ok"
        assert replayed.messages == trajectory.messages
        turns.append(sum(m["role"] == "assistant" for m in trajectory.messages))
    assert min(turns) >= 2
    assert max(turns) <= 7
    assert 3.5 < sum(turns) / len(turns) < 6


def test_the_expert_varies_words_and_ways() -> None:
    ways, words = set(), set()
    task = next(t for t in tasks_of("exchange_item") if t.spec["user"]["opens_with_order"])
    for run in range(20):
        trajectory = ENV.expert(task, run)
        ways.add(tuple(c.name for a in actions_of(trajectory) for c in a.tool_calls))
        words.add(tuple(a.text for a in actions_of(trajectory)))
        assert ENV.expert(task, run) == trajectory
    assert ways == {("get_order", "get_stock", "exchange_item"), ("get_stock", "get_order", "exchange_item")}
    assert len(words) >= 6
    assert len({ENV.expert(task, run).id for run in range(3)}) == 3


def test_expert_messages_have_the_shape_of_the_schema() -> None:
    for task in TRAIN[:70]:
        messages = ENV.expert(task).messages
        assert [m["role"] for m in messages[:2]] == ["system", "user"]
        pending: list[str] = []
        for message in messages:
            if message["role"] == "assistant":
                assert ("tool_calls" in message) != ("content" in message)  # text or calls, as small models learn it
                assert "thinking" not in message
                pending = [c["id"] for c in message.get("tool_calls", ())]
            elif message["role"] == "tool":
                assert message["tool_call_id"] == pending.pop(0)
        ids = [c["id"] for m in messages for c in m.get("tool_calls", ())]
        assert len(ids) == len(set(ids))


# Judge


@pytest.mark.parametrize(
    ("family", "key", "reason"),
    [
        ("return_items", "to", "wrong_method"),
        ("return_items", "items", "wrong_items"),
        ("exchange_item", "new_item", "wrong_variant"),
        ("change_address", "address", "wrong_address"),
        ("cancel_order", "order", "wrong_order"),
        ("refuse_status", "reason", "wrong_reason"),
    ],
)
def test_one_wrong_argument_fails_with_its_reason(family: str, key: str, reason: str) -> None:
    for task in tasks_of(family)[:25]:
        spec = task.spec
        right = rules.right_write(spec["db"], spec["request"])
        order = spec["db"]["orders"][spec["request"]["order"]]
        held = set(order["items"])
        wrong: object = {
            "to": "card" if right.arguments.get("to") == "credit" else "credit",
            "items": sorted(held - set(right.arguments.get("items", ()))),
            "address": "1 Nowhere Lane",
            "order": next(o for o in spec["db"]["orders"] if o != spec["request"]["order"]),
            "reason": "no_stock",
            "new_item": next(
                (s for s in spec["db"]["stock"][shop.product_of(spec["request"]["items"][0])]
                 if s not in (right.arguments.get("new_item"), right.arguments.get("item"))), None),
        }[key]  # fmt: skip
        outcome = swap_write(task, {key: wrong}).outcome()
        assert (outcome.success, outcome.reason) == (False, reason)


def test_items_may_be_named_in_any_order() -> None:
    task = next(t for t in tasks_of("return_items") if len(t.spec["request"]["items"]) == 2)
    right = rules.right_write(task.spec["db"], task.spec["request"])
    for items in (right.arguments["items"], right.arguments["items"][::-1]):
        assert swap_write(task, {"items": items}).outcome().success


def test_a_write_before_the_customers_yes_fails() -> None:
    for task in [t for f in ("cancel_order", "return_items", "exchange_item", "change_address") for t in tasks_of(f)]:
        actions = actions_of(ENV.expert(task))
        write = next(i for i, a in enumerate(actions) if a.tool_calls and a.tool_calls[0].name in shop.WRITES)
        hasty = [a for i, a in enumerate(actions) if i != write - 1]  # without the proposal
        outcome = play(task, *hasty).outcome()
        assert (outcome.success, outcome.reason) == (False, "premature_write"), task.id


def test_the_customer_must_be_told_the_outcome() -> None:
    for family in ("cancel_order", "return_items", "exchange_item", "change_address", "refuse_rules"):
        task = tasks_of(family)[0]
        actions = actions_of(ENV.expert(task))
        silent = play(task, *actions[:-1], say("All set."), say("Have a nice day."))
        assert silent.done
        assert silent.outcome().reason == "user_not_told"
        late = play(task, *actions[:-1], say("All set."))
        assert late.messages[-1]["role"] == "user"  # asks once
        late.step(actions[-1])
        assert late.outcome().reason == "ok"


def test_doing_what_a_rule_forbids_fails_and_a_needless_transfer_too() -> None:
    for task in tasks_of("refuse_status", "cancel"):
        order = task.spec["request"]["order"]
        episode = play(task, say(f"Shall I cancel {order}?"), call("cancel_order", order=order))
        refund = json.loads(episode.messages[-1]["content"])["refund"]  # the tool does it: the policy is the agent's
        episode.step(say(f"{order} is cancelled, ${refund} back."))
        assert episode.outcome().reason == "forbidden_write"
    for task in tasks_of("cancel_order")[:20]:
        episode = play(task, call("transfer_to_human", reason="not_pending"), say("A colleague will help you."))
        assert episode.outcome().reason == "needless_transfer"


def test_questions_need_the_right_answer_from_a_look_up() -> None:
    words = {"status": ("pending", "shipped", "delivered"), "method": ("card", "credit"), "returnable": ("yes", "no")}
    for task in tasks_of("answer_question"):
        topic = task.spec["request"]["topic"]
        answer = rules.right_answer(task.spec["db"], task.spec["request"])
        wrong = next(w for w in (*words.get(topic, ()), "77") if w != answer)
        actions = actions_of(ENV.expert(task))
        assert play(task, *actions[:-1], say(f"It is {wrong}.")).outcome().reason == "wrong_answer"
        assert play(task, say(f"It is {answer}.")).outcome().reason == "answer_not_looked_up"
        if topic in words:
            assert play(task, *actions[:-1], say(" or ".join(words[topic]))).outcome().reason == "wrong_answer"


def test_a_claim_without_a_write_fools_the_customer_not_the_judge() -> None:
    task = tasks_of("cancel_order")[0]
    order = task.spec["request"]["order"]
    episode = play(task, call("get_order", order=order), say(f"{order} has been cancelled."))
    assert episode.done
    assert episode.outcome().reason == "false_claim"


def test_the_limit_on_turns_ends_the_episode() -> None:
    episode = play(TRAIN[0], *[say("Hm.")] * 20, max_turns=4)
    assert episode.done
    assert episode.turns == 4
    assert episode.outcome().reason == "too_many_turns"


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


@settings(max_examples=300, deadline=None)
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
