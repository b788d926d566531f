"""The scripted expert: decides from what the tools returned, as an agent must; words and order of look-ups vary."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

from pivotrl.environments.base import Task
from pivotrl.environments.outfitters import rules
from pivotrl.environments.outfitters.episode import OutfittersEpisode
from pivotrl.environments.outfitters.shop import product_of
from pivotrl.environments.outfitters.tasks import NAME, VERSION
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall

_MAX_TURNS = 12
_WHY = {
    "not_pending": ("{o} is already {s}", "the order has been {s}", "{o} is no longer pending, it is {s}"),
    "not_delivered": ("{o} is not delivered yet", "{o} is still {s}", "the order is only {s}"),
    "too_late": ("it was delivered {d} days ago", "{d} days after delivery is too late", "the time limit has passed"),
    "no_stock": ("it is sold out", "we have none left", "it is out of stock"),
}


class Expert:
    """Plays one episode. The wish is read from the task (understanding it is not at issue), the facts from tools."""

    def __init__(self, task: Task, run: int) -> None:
        self.rng = Random(f"{NAME}/{VERSION}/expert/{task.id}/{run}")
        self.episode = OutfittersEpisode(task, _MAX_TURNS)
        self.request: JsonDict = task.spec["request"]
        self.user: JsonDict = task.spec["user"]

    def play(self) -> OutfittersEpisode:
        if self.request["kind"] == "question":
            self._answer()
        else:
            self._serve()
        return self.episode

    def _call(self, tool: str, /, **arguments: Any) -> JsonDict:
        self.episode.step(Action(tool_calls=(ToolCall(tool, arguments),)))
        result: JsonDict = json.loads(self.episode.messages[-1]["content"])
        return result

    def _say(self, *options: str, **values: Any) -> str:
        """Say one of the options; returns the customer's reply ("" where the dialogue is over)."""
        self.episode.step(Action(text=self.rng.choice(options).format(**values)))
        return "" if self.episode.done else str(self.episode.messages[-1]["content"])

    def _find_order(self) -> tuple[str, JsonDict]:
        """The order's id and facts: by its number, or where the customer has none, by name and product."""
        heard = self.episode.messages[1]["content"]
        if not self.user["opens_with_order"] and not self.user["opens_with_name"]:
            heard = self._say(*_ASK_ORDER)
        if found := re.search(r"W\d{4}", heard):
            order_id = found[0]
        else:
            product = product_of(self.request["items"][0])
            orders = self._call("find_orders", name=self.user["name"])
            order_id = next(one for one, products in orders.items() if product in products)
        return order_id, self._call("get_order", order=order_id)

    def _answer(self) -> None:
        topic = self.request["topic"]
        if topic == "stock":
            sku = self.request["sku"]
            stock = self._call("get_stock", product=product_of(sku))
            self._say(*_ANSWERS[topic], sku=sku, v=stock[sku])
            return
        order_id, order = self._find_order()
        if topic == "returnable":
            self._say_returnable(order_id, order)
        else:
            value = rules.refund_method(order["level"]) if topic == "method" else order[topic]
            self._say(*_ANSWERS[topic], o=order_id, v=value)

    def _say_returnable(self, order_id: str, order: JsonDict) -> None:
        limit = rules.window_days(order["level"])
        if order["status"] != "delivered":
            self._say("No, {o} is {s}, not delivered.", "No, {o} is still {s}.", o=order_id, s=order["status"])
        elif order["days"] > limit:
            self._say("No, the {d} days for {o} are over.", "No, it is more than {d} days.", o=order_id, d=limit)
        else:
            self._say("Yes, {o} is within {d} days.", "Yes, you have {d} days for {o}.", o=order_id, d=limit)

    def _serve(self) -> None:
        kind = self.request["kind"]
        stock = None
        # With the order's number at hand, the stock may be looked up first.
        if kind == "exchange" and self.user["opens_with_order"] and self.rng.random() < 0.3:
            stock = self._call("get_stock", product=product_of(self.request["items"][0]))
        order_id, order = self._find_order()
        wanted = "pending" if kind in ("cancel", "address") else "delivered"
        if order["status"] != wanted:
            self._refuse(f"not_{wanted}", order_id, order)
        elif kind == "cancel":
            self._say(*_PLANS[kind], o=order_id)
            done = self._call("cancel_order", order=order_id)
            self._say(*_DONE[kind], o=order_id, v=done["refund"])
        elif kind == "address":
            self._readdress(order_id)
        elif order["days"] > rules.window_days(order["level"]):
            self._refuse("too_late", order_id, order)
        elif kind == "return":
            self._take_back(order_id, order)
        else:
            self._exchange(order_id, order, stock)

    def _readdress(self, order_id: str) -> None:
        if not self.user["opens_with_address"]:
            self._say("What is the new address?", "Which address should it go to?", "Please give me the new address.")
        address = self.request["address"]
        self._say(*_PLANS["address"], o=order_id, a=address)
        self._call("change_address", order=order_id, address=address)
        self._say(*_DONE["address"], o=order_id, a=address)

    def _take_back(self, order_id: str, order: JsonDict) -> None:
        skus = [sku for sku in order["items"] if sku in self.request["items"]]
        method = rules.refund_method(order["level"])
        self._say(*_PLANS["return"], o=order_id, i=" and ".join(skus), m=_METHOD[method])
        done = self._call("return_items", order=order_id, items=skus, to=method)
        self._say(*_DONE["return"], v=done["refund"], m=_METHOD[method])

    def _exchange(self, order_id: str, order: JsonDict, stock: JsonDict | None) -> None:
        old = self.request["items"][0]
        stock = stock or self._call("get_stock", product=product_of(old))
        new = rules.choose_variant(stock, self.request["want"], self.request["fallback"])
        if new is None:
            self._refuse("no_stock", order_id, order)
            return
        self._say(*_PLANS["exchange"], o=order_id, old=old, new=new)
        self._call("exchange_item", order=order_id, item=old, new_item=new)
        self._say(*_DONE["exchange"], o=order_id, new=new)

    def _refuse(self, reason: str, order_id: str, order: JsonDict) -> None:
        self._call("transfer_to_human", reason=reason)
        why = self.rng.choice(_WHY[reason]).format(o=order_id, s=order["status"], d=order.get("days"))
        self._say(*_REFUSED, why=why)


_METHOD = {"card": "your card", "credit": "store credit"}
_ASK_ORDER = (
    "What is your order number?",
    "Could you give me the order number?",
    "Sure. Which order number is it?",
    "Happy to help. What is the order number?",
    "I need the order number, or your name, please.",
)
_ANSWERS = {
    "status": ("Order {o} is {v}.", "{o} is {v}.", "The status of {o} is {v}."),
    "method": ("{o} would be refunded to {v}.", "The refund would go to {v}.", "To {v}."),
    "stock": ("We have {v} of {sku}.", "There are {v} of {sku} in stock.", "Our stock of {sku} is {v}."),
}
_PLANS = {
    "cancel": (
        "I can cancel {o} and refund you. Shall I?",
        "Shall I cancel order {o}?",
        "{o} is pending, so I can cancel it. Go ahead?",
    ),
    "address": (
        "Shall I send {o} to {a}?",
        "I will change the address of {o} to {a}. OK?",
        "New address for {o}: {a}. Is that right?",
    ),
    "return": (
        "I can return {i} from {o}, refund to {m}. OK?",
        "Return {i}, with the refund to {m}. Shall I?",
        "I will take back {i} and refund to {m}. Go ahead?",
    ),
    "exchange": (
        "I can exchange {old} for {new}. OK?",
        "{new} is in stock. Shall I swap {old} for it?",
        "Shall I exchange {old} in {o} for {new}?",
    ),
}
_DONE = {
    "cancel": (
        "{o} is cancelled. You get ${v} back.",
        "Done, {o} is cancelled and ${v} refunded.",
        "Cancelled. Your refund is ${v}.",
    ),
    "address": ("Done. {o} goes to {a}.", "{o} will now be sent to {a}.", "The new address of {o} is {a}."),
    "return": ("Done. ${v} goes to {m}.", "You get ${v} to {m}.", "Returned. Refund: ${v} to {m}."),
    "exchange": ("Done. You will get {new}.", "{new} is on its way to you.", "Exchanged: {new} is yours now."),
}
_REFUSED = (
    "I am sorry, {why}. A colleague will contact you.",
    "That is not possible: {why}. I passed you to a colleague.",
    "Sorry, I cannot do that, {why}. A specialist will take over.",
)
