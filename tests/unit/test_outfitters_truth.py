"""What is told must be so: a policy learns to write whatever a customer of key words takes for the right message."""

from __future__ import annotations

from dataclasses import replace

import pytest
from outfitters_play import ENV, TRAIN, actions_of, call, play, say, tasks_of

from pivotrl.config import VerifierConfig
from pivotrl.environments.outfitters.truth import untruth
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall, Turn
from pivotrl.trajectories.turns import split_turns
from pivotrl.verifiers.registry import get_verifier

BEFORE: list[JsonDict] = [
    {"role": "system", "content": "within 30 days"},
    {"role": "user", "content": "Please send order W1111 to 69 Park Lane."},
    {"role": "assistant", "tool_calls": [{"id": "c", "name": "get_order", "arguments": {"order": "W9999"}}]},
    {"role": "tool", "tool_call_id": "c", "content": '{"W2222":["hat"],"hat-red-s":14,"days":12}'},
    {"role": "assistant", "content": "It is 5263."},
]
ORDERS: JsonDict = {"W1111": {"status": "pending"}, "W2222": {"status": "shipped"}}
HANDED = ToolCall("transfer_to_human", {"reason": "not_pending"})


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("Shall I send W1111 to 69 Park Lane?", None),
        ("W1111 is still pending; within 30 days you have 14 hat-red-s.", None),
        ("Three of the 3 items are $12.00.", None),
        ("Shall I send W1111 to 454?", "unseen_value"),
        ("New address for W1111: 59 Binary Grays.", "unseen_value"),
        ("It is 5263.", "unseen_value"),  # the agent's own words give nothing
        ("W9999 is yours.", "unseen_value"),
        ("hat-blue-s is in stock.", "unseen_value"),
        ("W1111 is already delivered.", "wrong_status"),
        ("Sorry, it has been  shipped.", "wrong_status"),
        ("W2222 is pending, so I can cancel it.", "wrong_status"),
        ("W2222 is shipped.", None),
        ("W1111 is no longer shipped; it is not delivered, has not been delivered, will be delivered.", None),
        ("W1111 is shipped, and W2222 is pending.", None),  # of two orders: not told apart
        ("I passed you to a colleague. Shall I send W1111 to 69 Park Lane?", "not_handed_over"),
        ("Done. A specialist will take over.", "not_handed_over"),
        ("Shall I pass you to a colleague?", None),
    ],
)
def test_untruths(text: str, wrong: str | None) -> None:
    assert untruth(text, BEFORE, ORDERS, "W1111", []) == wrong
    if wrong == "not_handed_over":
        assert untruth(text, BEFORE, ORDERS, "W1111", [HANDED]) is None


def test_an_episode_with_an_untruth_fails_though_its_write_is_right() -> None:
    for family in ("cancel_order", "return_items", "exchange_item", "change_address"):
        task = tasks_of(family)[0]
        actions = actions_of(ENV.expert(task))
        assert play(task, *actions).outcome().reason == "ok"
        last = actions[-1]
        padded = play(task, *actions[:-1], replace(last, text=f"{last.text} A colleague will contact you."))
        assert (padded.outcome().success, padded.outcome().reason) == (False, "untrue")
    task = tasks_of("answer_question")[0]
    actions = actions_of(ENV.expert(task))
    assert (
        play(task, *actions[:-1], replace(actions[-1], text=actions[-1].text + " W0000.")).outcome().reason == "untrue"
    )


def test_the_stock_of_another_variant_is_no_answer() -> None:
    for task in [t for t in tasks_of("answer_question") if t.spec["request"]["topic"] == "stock"]:
        *before, last = actions_of(ENV.expert(task))
        sku = task.spec["request"]["sku"]
        other = next(one for one in task.spec["db"]["stock"][sku.split("-")[0]] if one != sku)
        assert sku in last.text
        wrong = replace(last, text=last.text.replace(sku, other))
        assert play(task, *before, wrong).outcome().reason == "wrong_answer"


def text_turns(name: str) -> list[Turn]:
    """Turns of a text whose demonstration contains `name`."""
    found = [t for task in TRAIN[:200] for t in split_turns(ENV.expert(task), "train") if isinstance(t, Turn)]
    return [t for t in found if name in t.demonstration.text]


# Words that an earlier verifier took for the demonstrated ones, as a policy trained on its rewards wrote them.
EXPLOITS = {
    "Shall I send W": "Sorry, {o} is already delivered. Shall I send {o} to {a}?",
    "I will change the address of W": "I passed you to a colleague. Shall I send {o} to {a}? Is that right?",
    "is still pending. A colleague": "That is not possible: {o} is already delivered. A colleague will contact you.",
    "Which address should it go to?": "New address for {o} would be 454. Shall I send {o} to 454?",
}


@pytest.mark.parametrize("demonstrated", EXPLOITS)
def test_exploits_are_rejected(demonstrated: str) -> None:
    verifier = get_verifier(VerifierConfig("execution", {"environment": "outfitters"}))
    turns = text_turns(demonstrated)
    assert turns
    for turn in turns:
        request = ENV.task(turn.task_id or "").spec["request"]
        text = EXPLOITS[demonstrated].format(o=request["order"], a=request.get("address"))
        assert verifier.verify(turn, Action(text)).reward == 0.0, text
        assert verifier.verify(turn, turn.demonstration).reward == 1.0


def test_agreeing_to_another_order_is_another_effect() -> None:
    """A customer that does not know its order's number agrees to any; the plan is another one all the same."""
    for task in tasks_of("cancel_order"):
        spec, request = task.spec, task.spec["request"]
        others = [o for o in spec["db"]["customers"][spec["user"]["name"]]["orders"] if o != request["order"]]
        if spec["user"]["knows_order"] or not others:
            continue
        product = request["items"][0].split("-")[0]
        look = call("find_orders", name=spec["user"]["name"])
        right, wrong = (
            play(task, look, say(f"Shall I cancel {o} with the {product}?")) for o in (request["order"], others[0])
        )
        assert right.messages[-1] == wrong.messages[-1]
        assert right.state_hash() != wrong.state_hash()
        return
    raise AssertionError("no such task")
