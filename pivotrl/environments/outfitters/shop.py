"""The shop: its policy text, its database and the tools that read and write it.

Database (plain JSON):
    customers: {name: {"level": "basic" | "gold", "orders": [order id]}}
    orders: {order id: {"customer", "status", "days" (since delivery, or None), "items": {sku: dollars}, "address",
             "returned": {sku: "card" | "credit"}, "exchanged": {old sku: new sku}}}
    stock: {product: {sku: count}}
    transfers: [reason]

Tools refuse only what is impossible (an unknown id, an item that is not in the order). What the policy forbids they
carry out: keeping the policy is the agent's part, and the final state shows whether it did.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from typing import Any

from pivotrl.environments.argument_check import check_value
from pivotrl.trajectories.schema import JsonDict, ToolCall

BASIC_WINDOW_DAYS = 30
GOLD_WINDOW_DAYS = 60
REASONS = ("not_pending", "not_delivered", "too_late", "no_stock")
STATUSES = ("pending", "shipped", "delivered", "cancelled")

POLICY = f"""You run the order desk of Outfitters. Look facts up.
- Cancel or change the address of pending orders only.
- Return or exchange delivered orders only, within {BASIC_WINDOW_DAYS} days (gold {GOLD_WINDOW_DAYS}).
- Refund gold to card, basic to credit.
- Exchange only for items in stock.
- Before a change get a yes; after it tell the refund, new item or address.
- If a rule forbids it, transfer_to_human and say so."""


def _tool(name: str, properties: JsonDict) -> JsonDict:
    # No descriptions: the names say it, and a small model's prompt has to be short.
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


_STRING = {"type": "string"}
_ORDER = {"order": _STRING}

TOOLS: list[JsonDict] = [
    _tool("find_orders", {"name": _STRING}),
    _tool("get_order", _ORDER),
    _tool("get_stock", {"product": _STRING}),
    _tool("cancel_order", _ORDER),
    _tool(
        "return_items",
        _ORDER | {"items": {"type": "array", "items": _STRING}, "to": {"type": "string", "enum": ["card", "credit"]}},
    ),
    _tool("exchange_item", _ORDER | {"item": _STRING, "new_item": _STRING}),
    _tool("change_address", _ORDER | {"address": _STRING}),
    _tool("transfer_to_human", {"reason": {"type": "string", "enum": list(REASONS)}}),
]
_PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
WRITES = frozenset({"cancel_order", "return_items", "exchange_item", "change_address", "transfer_to_human"})


class ToolError(Exception):
    """A call that cannot be carried out; the message goes to the agent."""


def product_of(sku: str) -> str:
    return sku.split("-", 1)[0]


def _find_orders(db: JsonDict, name: str) -> JsonDict:
    for known, customer in db["customers"].items():
        if known.lower() == name.strip().lower():
            return {order: [product_of(sku) for sku in db["orders"][order]["items"]] for order in customer["orders"]}
    raise ToolError("no such customer")


def _order(db: JsonDict, order: str) -> JsonDict:
    if order not in db["orders"]:
        raise ToolError("no such order")
    row: JsonDict = db["orders"][order]
    return row


def _get_order(db: JsonDict, order: str) -> JsonDict:
    row = _order(db, order)
    facts = {"status": row["status"]}
    if row["days"] is not None:
        facts["days"] = row["days"]
    level = db["customers"][row["customer"]]["level"]
    return facts | {"level": level, "items": list(row["items"])}


def _get_stock(db: JsonDict, product: str) -> JsonDict:
    if product not in db["stock"]:
        raise ToolError(f"no such product, only {', '.join(db['stock'])}")
    row: JsonDict = db["stock"][product]
    return row


def _cancel_order(db: JsonDict, order: str) -> JsonDict:
    row = _order(db, order)
    if row["status"] == "cancelled":
        raise ToolError("already cancelled")
    row["status"] = "cancelled"
    return {"refund": sum(row["items"].values())}


def _held(row: JsonDict, sku: str) -> None:
    if sku not in row["items"]:
        raise ToolError(f"no such item in the order, only {', '.join(row['items'])}")
    if sku in row["returned"] or sku in row["exchanged"]:
        raise ToolError("already returned or exchanged")


def _return_items(db: JsonDict, order: str, items: list[str], to: str) -> JsonDict:
    row = _order(db, order)
    if not items or len(set(items)) < len(items):
        raise ToolError("name each item once")
    for sku in items:
        _held(row, sku)
    row["returned"].update(dict.fromkeys(items, to))
    return {"refund": sum(row["items"][sku] for sku in items)}


def _exchange_item(db: JsonDict, order: str, item: str, new_item: str) -> JsonDict:
    row = _order(db, order)
    _held(row, item)
    stock = db["stock"][product_of(item)]
    if new_item not in stock or new_item == item:
        raise ToolError("no such new item of this product")
    row["exchanged"][item] = new_item
    stock[new_item] -= 1  # below zero: the customer waits, which the policy does not want
    return {"ok": True}


def _change_address(db: JsonDict, order: str, address: str) -> JsonDict:
    _order(db, order)["address"] = " ".join(address.split())
    return {"ok": True}


def _transfer(db: JsonDict, reason: str) -> JsonDict:
    db["transfers"].append(reason)
    return {"ok": True}


_FUNCTIONS: dict[str, Callable[..., JsonDict]] = {
    "find_orders": _find_orders,
    "get_order": _get_order,
    "get_stock": _get_stock,
    "cancel_order": _cancel_order,
    "return_items": _return_items,
    "exchange_item": _exchange_item,
    "change_address": _change_address,
    "transfer_to_human": _transfer,
}


def execute(db: JsonDict, call: ToolCall) -> JsonDict:
    """Carry out one call on `db`, in place. Total: what is wrong comes back as {"error": words}, `db` unchanged."""
    if not isinstance(call.name, str) or call.name not in _FUNCTIONS:
        return {"error": f"no such tool: {str(call.name)[:40]}"}
    if problem := check_value(call.arguments, _PARAMETERS[call.name], "arguments"):
        return {"error": problem}
    try:
        return _FUNCTIONS[call.name](db, **call.arguments)
    except ToolError as error:
        return {"error": str(error)}


def state_hash(db: JsonDict) -> str:
    """Hash of the whole state; equal states have equal hashes whatever the order of their keys."""
    # ASCII escapes: an address may hold what UTF-8 cannot encode (a lone surrogate).
    return hashlib.sha256(json.dumps(db, sort_keys=True, ensure_ascii=True).encode()).hexdigest()


def compact(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
