"""The policy as code: what an order desk that keeps every rule does for a wish. The judge rests on it."""

from __future__ import annotations

from pivotrl.environments.outfitters.shop import BASIC_WINDOW_DAYS, GOLD_WINDOW_DAYS, product_of
from pivotrl.trajectories.schema import JsonDict, ToolCall


def window_days(level: str) -> int:
    return GOLD_WINDOW_DAYS if level == "gold" else BASIC_WINDOW_DAYS


def refund_method(level: str) -> str:
    return "card" if level == "gold" else "credit"


def choose_variant(stock: dict[str, int], want: str, fallback: str | None) -> str | None:
    """The wanted sku if in stock, else the customer's second choice if in stock, else None."""
    for sku in (want, fallback):
        if sku is not None and stock.get(sku, 0) > 0:
            return sku
    return None


def returnable(order: JsonDict, level: str) -> bool:
    return bool(order["status"] == "delivered" and order["days"] <= window_days(level))


def right_write(db: JsonDict, request: JsonDict) -> ToolCall | None:
    """The one write that serves `request` (see tasks.py) under the policy; None for a question."""
    kind = request["kind"]
    if kind == "question":
        return None
    order_id = request["order"]
    order = db["orders"][order_id]
    level = db["customers"][order["customer"]]["level"]
    if kind in ("cancel", "address"):
        if order["status"] != "pending":
            return transfer("not_pending")
        if kind == "cancel":
            return ToolCall("cancel_order", {"order": order_id})
        return ToolCall("change_address", {"order": order_id, "address": request["address"]})
    if order["status"] != "delivered":
        return transfer("not_delivered")
    if not returnable(order, level):
        return transfer("too_late")
    if kind == "return":
        arguments = {"order": order_id, "items": list(request["items"]), "to": refund_method(level)}
        return ToolCall("return_items", arguments)
    sku = request["items"][0]
    new = choose_variant(db["stock"][product_of(sku)], request["want"], request["fallback"])
    if new is None:
        return transfer("no_stock")
    return ToolCall("exchange_item", {"order": order_id, "item": sku, "new_item": new})


def transfer(reason: str) -> ToolCall:
    return ToolCall("transfer_to_human", {"reason": reason})


def right_answer(db: JsonDict, request: JsonDict) -> str | None:
    """What a question asks for, as the number or word that must be said; None where the wish is no question."""
    if request["kind"] != "question":
        return None
    topic = request["topic"]
    if topic == "stock":
        return str(db["stock"][product_of(request["sku"])][request["sku"]])
    order = db["orders"][request["order"]]
    level = db["customers"][order["customer"]]["level"]
    answers = {
        "status": order["status"],
        "method": refund_method(level),
        "returnable": "yes" if returnable(order, level) else "no",
    }
    return str(answers[topic])
