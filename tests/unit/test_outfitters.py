"""The order desk: tasks, expert and judge."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from outfitters_play import ENV, TRAIN, actions_of, call, play, say, swap_write, tasks_of

from pivotrl.environments.base import Task
from pivotrl.environments.outfitters import rules, shop
from pivotrl.environments.outfitters.tasks import FAMILIES
from pivotrl.errors import UserError

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
