"""Procedural tasks. A task's spec is self-contained JSON:

    db       the shop's database (shop.py)
    request  {"kind": "cancel" | "return" | "exchange" | "address" | "question", "order": id, "items": [sku], and by
              kind "want" and "fallback" (skus), "address", "topic" (one of TOPICS), "sku"}
    user     {"name", "knows_order": bool, "opens_with_order", "opens_with_name", "opens_with_address": bool,
              "asks_for": refund method | None}

Train and test draw their names, addresses and order numbers from disjoint sets: no task of one occurs in the other.
"""

from __future__ import annotations

from random import Random
from typing import Any

from pivotrl.environments.outfitters.rules import window_days
from pivotrl.environments.outfitters.shop import product_of
from pivotrl.environments.procedural import SPLITS, TaskMaker
from pivotrl.trajectories.schema import JsonDict

NAME = "outfitters"
VERSION = "1"
FAMILIES = (
    "cancel_order",
    "return_items",
    "exchange_item",
    "change_address",
    "answer_question",
    "refuse_status",
    "refuse_rules",
)
TOPICS = ("status", "method", "returnable", "stock")

_FIRST = {
    "train": ("Dana", "Omar", "Lena", "Ivan", "Rosa", "Hugo", "Mina", "Paul", "Vera", "Carl", "Nora", "Alan"),
    "test": ("Emma", "Luis", "Sara", "Adam", "Tina", "Mark", "Julia", "Peter"),
}
_LAST = {
    "train": ("Reed", "Lopez", "Stone", "Novak", "Price", "Kim", "Wells", "Ford", "Grant", "Silva", "Brown", "Young"),
    "test": ("Hill", "Costa", "Cole", "Park", "West", "Lang", "Moore", "Hall"),
}
_STREETS = {
    "train": ("Oak Lane", "Mill Road", "Lake Street", "Hill Road", "Pine Street", "North Road", "Rose Lane"),
    "test": ("Elm Street", "River Road", "Park Lane", "King Street"),
}
_CATALOGUE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {  # product: colours, sizes
    "coat": (("red", "blue", "green"), ("s", "m", "l")),
    "shirt": (("white", "blue", "black"), ("s", "m", "l")),
    "vest": (("brown", "black", "red"), ("s", "m", "l")),
    "hat": (("black", "white", "red"), ("s", "m", "l")),
    "tent": (("green", "orange", "blue"), ("2", "3", "4")),
    "pack": (("black", "green", "red"), ("30", "40", "50")),
}


class _Maker:
    """Draws one task."""

    def __init__(self, rng: Random, split: str) -> None:
        self.rng = rng
        self.split = split
        self.orders: JsonDict = {}
        # "pack" twice would make "the pack" ambiguous: each product is in one order of the customer at most.
        self.left = list(_CATALOGUE)
        rng.shuffle(self.left)

    def make(self, family: str) -> dict[str, Any]:
        rng = self.rng
        name, other = self._name(), self._name()
        while other == name:
            other = self._name()
        level = rng.choice(("basic", "gold"))
        kind, status, days, shortage = self._situation(family, level)
        stock = {product: self._product(product) for product in _CATALOGUE}
        # Two or three items to return some of; few enough for three orders of the catalogue's six products.
        size = rng.choice((2, 2, 3)) if kind == "return" else rng.choice((1, 2, 2))
        target = self._order(name, status, days, stock, size)
        second_status = rng.choice(("pending", "shipped", "delivered"))
        second = self._order(
            name, second_status, rng.randint(2, 95) if second_status == "delivered" else None, stock, 1
        )
        request = self._request(kind, target, stock, shortage)
        stranger = self._order(other, "pending", None, stock, 1)
        ids = [target, second]
        rng.shuffle(ids)
        customers = {
            name: {"level": level, "orders": ids},
            other: {"level": rng.choice(("basic", "gold")), "orders": [stranger]},
        }
        opens_with_order = rng.random() < 0.5
        knows_order = opens_with_order or rng.random() < 0.5
        user = {
            "name": name,
            "knows_order": knows_order,
            "opens_with_order": opens_with_order,
            # An exchange is the longest dialogue: it starts with what finds the order.
            "opens_with_name": not knows_order and (kind == "exchange" or rng.random() < 0.4),
            "opens_with_address": not opens_with_order or rng.random() < 0.5,
            "asks_for": rng.choice((None, None, "card", "credit")) if kind == "return" else None,
        }
        return {
            "db": {"customers": customers, "orders": self.orders, "stock": stock, "transfers": []},
            "request": request,
            "user": user,
        }

    def _situation(self, family: str, level: str) -> tuple[str, str, int | None, str]:
        """(kind of wish, order status, days since delivery, how much of the wanted stock is there)."""
        rng = self.rng
        limit = window_days(level)
        # Most of the dates lie where only the membership decides (31 to 60 days).
        good = rng.randint(31, limit) if level == "gold" and rng.random() < 0.6 else rng.randint(2, 30)
        late = rng.randint(31, 60) if level == "basic" and rng.random() < 0.7 else rng.randint(61, 95)
        if family == "refuse_rules":
            kind, why = rng.choice((("return", "late"), ("exchange", "late"), ("exchange", "stock")))
            return (kind, "delivered", late, "want") if why == "late" else (kind, "delivered", good, "none")
        if family == "refuse_status":
            kind = rng.choice(("cancel", "address", "return", "exchange"))
            status = rng.choice(("shipped", "delivered") if kind in ("cancel", "address") else ("pending", "shipped"))
            return kind, status, rng.randint(2, 95) if status == "delivered" else None, "want"
        if family == "answer_question":
            status = rng.choice(("pending", "shipped", "delivered", "delivered"))
            return "question", status, rng.choice((good, late)) if status == "delivered" else None, "want"
        if family in ("cancel_order", "change_address"):
            return "cancel" if family == "cancel_order" else "address", "pending", None, "want"
        return "return" if family == "return_items" else "exchange", "delivered", good, rng.choice(("want", "fallback"))

    def _name(self) -> str:
        return f"{self.rng.choice(_FIRST[self.split])} {self.rng.choice(_LAST[self.split])}"

    def _address(self) -> str:
        return f"{self.rng.randint(2, 99)} {self.rng.choice(_STREETS[self.split])}"

    def _order_id(self) -> str:
        while True:
            number = self.rng.randint(1000, 9999)
            # Digit sums: even in train, odd in test. Disjoint, and every digit occurs at every place in both.
            if sum(map(int, str(number))) % 2 == SPLITS.index(self.split) and f"W{number}" not in self.orders:
                return f"W{number}"

    def _product(self, product: str) -> JsonDict:
        """Four of the nine variants: two colours by two sizes."""
        rng = self.rng
        colours, sizes = (rng.sample(values, 2) for values in _CATALOGUE[product])
        skus = [f"{product}-{colour}-{size}" for colour in colours for size in sizes]
        rng.shuffle(skus)
        return {sku: rng.choice((0, 0, 1, 2, 3, 5, 7)) for sku in skus}

    def _order(self, name: str, status: str, days: int | None, stock: JsonDict, size: int) -> str:
        order_id = self._order_id()
        bought = [self.left.pop() for _ in range(size)]
        items = {self.rng.choice(list(stock[p])): self.rng.randint(4, 39) * 5 for p in bought}
        self.orders[order_id] = {
            "customer": name,
            "status": status,
            "days": days,
            "items": items,
            "address": self._address(),
            "returned": {},
            "exchanged": {},
        }
        return order_id

    def _request(self, kind: str, order_id: str, stock: JsonDict, shortage: str) -> JsonDict:
        rng = self.rng
        order = self.orders[order_id]
        skus = list(order["items"])
        request: JsonDict = {"kind": kind, "order": order_id, "items": [rng.choice(skus)]}
        if kind == "return" and len(skus) > 1:
            # Never all of them, so that "which items" is a decision too.
            request["items"] = sorted(rng.sample(skus, rng.randint(1, min(2, len(skus) - 1))))
        elif kind == "exchange":
            self._variants(request, stock, shortage)
        elif kind == "address":
            request["address"] = self._address()
            while request["address"] == order["address"]:
                request["address"] = self._address()
        elif kind == "question":
            request["topic"] = rng.choice(TOPICS)
            if request["topic"] == "stock":
                request["sku"] = rng.choice(list(stock[rng.choice(list(stock))]))
        return request

    def _variants(self, request: JsonDict, stock: JsonDict, shortage: str) -> None:
        """Set "want" and "fallback", and the stock so that the first, the second or none of them is there."""
        rng = self.rng
        old = request["items"][0]
        variants = stock[product_of(old)]
        want, second = rng.sample([sku for sku in variants if sku != old], 2)
        fallback = second if shortage == "fallback" or rng.random() < 0.6 else None
        variants[want] = 0 if shortage in ("fallback", "none") else rng.randint(1, 7)
        if fallback is not None and shortage != "want":
            variants[fallback] = 0 if shortage == "none" else rng.randint(1, 7)
        request["want"], request["fallback"] = want, fallback


def _spec(rng: Random, split: str, family: str) -> JsonDict:
    return _Maker(rng, split).make(family)


MAKER = TaskMaker(NAME, VERSION, FAMILIES, _spec)
