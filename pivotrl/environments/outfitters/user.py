"""The customer: a templated user that answers any text, and ends the dialogue when served (or made to believe so).

It knows its wish and its own data, not the shop's rules: it agrees to whatever fits the wish (a refund to the wrong
method too), so the agent's decisions are judged by the state, not corrected by the user.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random
from typing import Any

from pivotrl.environments.outfitters.shop import STATUSES, product_of
from pivotrl.trajectories.schema import JsonDict, ToolCall

ORDER_ID = re.compile(r"\bW\d{4}\b")
SKU = re.compile(r"\b[a-z]+-[a-z]+-\w+\b")
# A number on its own: not part of an id, of a sku or of a size.
_NUMBER = re.compile(r"(?<![\w.])(\d+)(?:\.00)?(?!\w|\.\d)")
_NO_NUMBERS = re.compile(rf"{ORDER_ID.pattern}|{SKU.pattern}|\bsize \w+", re.IGNORECASE)
_NONE_LEFT = re.compile(r"\b(none|sold out|out of stock|no more)\b")
_ASKS_ORDER = re.compile(r"\border (number|id|no)\b|\bwhich order\b|\bnumber of (the|your) order\b")
_ASKS_NAME = re.compile(r"\b(your|full|customer) name\b|\bwho (am i|are you)\b")
_ASKS_ADDRESS = re.compile(r"\b(what|which|new|give|tell)\b.*\baddress\b|\bwhere\b.*\b(send|ship|go)\b")
_ASKS_ITEMS = re.compile(r"\b(which|what) (item|product|one|size|colou?r|variant|sku)")
# "has been cancelled", "I exchanged": said without a write, the customer takes it for done. Not "can be cancelled".
_CLAIM = re.compile(
    r"\b(is|are|was|were|been|have|has|now|i|done)\b( now| been| already)*[ ,:]+"
    r"(cancell?ed|refunded|exchanged|swapped|updated|changed|returned|transferred)\b"
)
_HANDED_OVER = re.compile(r"\b(human|colleague|specialist|transfer\w*|supervisor|person|team)\b")
_WORDS = {"status": STATUSES, "method": ("card", "credit"), "returnable": ("yes", "no")}
_REFUSAL = re.compile(r"\b(cannot|can't|can not|unable|not possible|sorry|not allowed)\b")
_STEMS = {
    "cancel": ("cancel",),
    "return": ("return", "refund", "take back", "send back"),
    "exchange": ("exchange", "swap", "replace", "change"),
    "address": ("address", "send", "ship", "deliver"),
}


def variant_words(sku: str) -> str:
    """ "coat-red-l" as a customer says it."""
    product, colour, size = sku.split("-")
    return f"{colour} {product} in size {size}"


def says_variant(text: str, sku: str) -> bool:
    """Whether a lower-case text names the variant, as a sku or in words."""
    if re.search(rf"(?<![\w-]){re.escape(sku)}(?![\w-])", text):
        return True
    _, colour, size = sku.split("-")
    bare = SKU.sub(" ", text)
    return bool(re.search(rf"\b{colour}\b", bare) and re.search(rf"\bsize {size}\b", bare))


def numbers_of(text: str) -> list[str]:
    """Numbers on their own (not inside an order id, a sku or a size)."""
    return _NUMBER.findall(_NO_NUMBERS.sub(" ", text))


def _numbers(text: str) -> list[str]:
    """`numbers_of`, and 0 where none is left in words."""
    found = numbers_of(text)
    return found or (["0"] if _NONE_LEFT.search(text.lower()) else [])


def says_answer(text: str, topic: str, answer: str) -> bool:
    if topic not in _WORDS:
        return answer in _numbers(text)
    return _words_said(text.lower(), topic) == [answer]  # naming several is no answer


def _words_said(lower: str, topic: str) -> list[str]:
    return [word for word in _WORDS[topic] if re.search(rf"\b{word}\b", lower)]


def says_outcome(text: str, write: ToolCall, result: JsonDict) -> bool:
    """Whether the agent's text tells the customer what came of a carried-out write."""
    lower = " ".join(text.lower().split())
    if write.name == "transfer_to_human":
        return bool(_HANDED_OVER.search(lower))
    if write.name == "exchange_item":
        return says_variant(lower, write.arguments["new_item"])
    if write.name == "change_address":
        return " ".join(write.arguments["address"].lower().split()) in lower
    return str(result["refund"]) in _numbers(text)


@dataclass
class Customer:
    """One dialogue's user. `reply` is total and deterministic; `agreed` says whether it has said yes to its wish."""

    spec: dict[str, Any]
    rng: Random
    agreed: bool = False
    claimed: bool = False  # was told, without any write, that the wish is done
    served: bool = False
    _patience: int = 1  # times it asks again when a change was made but not told
    _turn: dict[str, int] = field(default_factory=dict)

    @property
    def request(self) -> JsonDict:
        request: JsonDict = self.spec["request"]
        return request

    def opening(self) -> str:
        user = self.spec["user"]
        name = f" I am {user['name']}." if user["opens_with_name"] else ""
        return self._wish(user["opens_with_order"], user["opens_with_address"]) + name

    def silence(self) -> str:
        return self._pick("silence", ("Hello? Are you there?", "...", "Are you still there?"))

    def reply(self, text: str, last_write: tuple[ToolCall, JsonDict] | None) -> str | None:
        """Answer to an agent text; None ends the dialogue. `last_write`: the last write carried out and its result."""
        lower = " ".join(text.lower().split())
        if last_write is not None:
            if self._patience and not says_outcome(text, *last_write):
                self._patience -= 1
                return self._pick("untold", ("So what is the outcome?", "And what does that mean for me?"))
            self.served = True
            return None
        if self.request["kind"] == "question":
            return self._hear_answer(text, lower)
        return self._hear_plan(text, lower)

    def _hear_answer(self, text: str, lower: str) -> str | None:
        topic = self.request["topic"]
        found = _words_said(lower, topic) if topic in _WORDS else _numbers(text)
        if found and ("?" not in text or says_answer(text, topic, self.spec["answer"])):
            self.served = True
            return None
        return self._supply(text, lower) or self._repeat()

    def _hear_plan(self, text: str, lower: str) -> str | None:
        kind = self.request["kind"]
        if "?" not in text and _CLAIM.search(lower):
            self.claimed = self.served = True
            return None
        others = set(ORDER_ID.findall(text)) - {self.request["order"]}
        if others and self.spec["user"]["knows_order"]:
            return f"No, my order is {self.request['order']}."
        # "I cannot cancel W1234" proposes nothing; "Red is gone, sorry. Shall I send blue?" does.
        if "?" not in text and _REFUSAL.search(lower):
            return self._pick("refused", ("Then please pass me on to someone who can.", "Who can decide that, then?"))
        if self._fits(kind, text, lower):
            return self._agree(lower)
        if kind == "return" and (objection := self._objection(lower)):
            return objection
        return self._supply(text, lower) or self._repeat()

    def _named(self, lower: str) -> set[str]:
        """Products of the customer's order that a text names."""
        order = self.spec["db"]["orders"][self.request["order"]]
        return {product_of(sku) for sku in order["items"] if re.search(rf"\b{product_of(sku)}", lower)}

    def _wished(self) -> set[str]:
        return {product_of(sku) for sku in self.request["items"]}

    def _fits(self, kind: str, text: str, lower: str) -> bool:
        """Whether a text proposes what the customer wishes, as far as the customer can tell."""
        if not any(stem in lower for stem in _STEMS[kind]):
            return False
        if kind == "cancel":
            return self.request["order"] in text or bool(self._named(lower))
        if kind == "address":
            return self.request["address"].lower() in lower
        if kind == "exchange":
            rest = lower.replace(self.request["items"][0], " ")
            choices = [sku for sku in (self.request["want"], self.request["fallback"]) if sku]
            return any(says_variant(rest, sku) for sku in choices)
        return self._named(lower) == self._wished() and bool(re.search(r"\b(card|credit)\b", lower))

    def _objection(self, lower: str) -> str | None:
        """What is amiss with a proposed return that nearly fits."""
        named = self._named(lower)
        if not named or not any(stem in lower for stem in _STEMS["return"]):
            return None
        if named != self._wished():
            return f"I only want to return the {_list(self.request['items'])}."
        return "How would I get the money back?"

    def _agree(self, lower: str) -> str:
        self.agreed = True
        asked = self.spec["user"]["asks_for"]
        if asked and not re.search(rf"\b{asked}\b", lower):
            return self._pick("grudging", ("All right then, yes.", "Not what I hoped for, but yes.", "Hm. OK, yes."))
        return self._pick("yes", ("Yes, please.", "Yes, go ahead.", "Yes, that is right.", "Yes, thanks."))

    def _supply(self, text: str, lower: str) -> str | None:
        """What the text asks for and the customer has."""
        user = self.spec["user"]
        if _ASKS_ORDER.search(lower):
            if self.request["kind"] == "question" and self.request["topic"] == "stock":
                return f"I have no order. {self._wish(False, True)}"
            if user["knows_order"]:
                return self._pick("order", ("It is {o}.", "{o}.", "Order {o}.")).format(o=self.request["order"])
            return self._pick("no order", ("I don't have it. My name is {n}.", "No idea. I am {n}.")).format(
                n=user["name"]
            )
        if _ASKS_NAME.search(lower):
            return self._pick("name", ("{n}.", "My name is {n}.")).format(n=user["name"])
        if self.request["kind"] == "address" and _ASKS_ADDRESS.search(lower):
            return self._pick("address", ("{a}.", "To {a}, please.", "The new one is {a}.")).format(
                a=self.request["address"]
            )
        return self._wish(user["knows_order"], True) if _ASKS_ITEMS.search(lower) else None

    def _repeat(self) -> str:
        lead = self._pick("repeat", ("", "As I said: ", "Again: "))
        return lead + self._wish(self.spec["user"]["knows_order"], True)

    def _wish(self, with_order: bool, with_address: bool) -> str:
        request = self.request
        kind = request["kind"]
        first = product_of(request["items"][0])
        ref = f"order {request['order']}" if with_order else f"my order with the {first}"
        source = f"from order {request['order']}" if with_order else "that I ordered"
        if kind == "question":
            variant = variant_words(request["sku"]) if request["topic"] == "stock" else ""
            return self._pick("wish", _QUESTIONS[request["topic"]]).format(ref=ref, variant=variant)
        if kind == "address" and not with_address:
            return self._pick("wish", _NEW_ADDRESS).format(ref=ref)
        if kind in ("cancel", "address"):
            return self._pick("wish", _WISHES[kind]).format(ref=ref, address=request.get("address"))
        if kind == "return":
            text = self._pick("wish", _WISHES[kind]).format(items=_list(request["items"]), source=source)
            asked = self.spec["user"]["asks_for"]
            return text + (f" I want {'the money on my card' if asked == 'card' else 'store credit'}." if asked else "")
        text = self._pick("wish", _WISHES[kind]).format(items=first, source=source, want=_choice(request["want"]))
        if request["fallback"]:
            text += self._pick("else", (" If that is sold out, {v}.", " If you have none, then {v}.")).format(
                v=_choice(request["fallback"])
            )
        return text

    def _pick(self, topic: str, options: tuple[str, ...]) -> str:
        """A first option by the task's seed, then the others in turn (so that it does not repeat itself)."""
        if topic not in self._turn:
            self._turn[topic] = self.rng.randrange(len(options))
        else:
            self._turn[topic] += 1
        return options[self._turn[topic] % len(options)]


def _list(skus: list[str]) -> str:
    return " and the ".join(product_of(sku) for sku in skus)


def _choice(sku: str) -> str:
    _, colour, size = sku.split("-")
    return f"{colour} in size {size}"


_QUESTIONS = {
    "status": ("What is the status of {ref}?", "Where is {ref}?", "Has {ref} left your shop yet?"),
    "method": ("Would {ref} be refunded to card or credit?", "Card or credit: how would you refund {ref}?"),
    "returnable": ("Can I still return {ref}?", "Could I send {ref} back today?", "May {ref} still be returned?"),
    "stock": ("How many do you have of the {variant}?", "What is your stock of the {variant}?"),
}
_NEW_ADDRESS = (
    "I moved. Can you send {ref} elsewhere?",
    "The address of {ref} is wrong.",
    "I need a new address on {ref}.",
)
_WISHES = {
    "cancel": (
        "Please cancel {ref}.",
        "I want to cancel {ref}.",
        "I no longer need {ref}. Cancel it.",
        "Can you cancel {ref}?",
    ),
    "address": (
        "Please send {ref} to {address}.",
        "I moved. Can {ref} go to {address}?",
        "Change {ref} to {address}, please.",
    ),
    "return": (
        "I want to return the {items} {source}.",
        "Can I send back the {items} {source}?",
        "The {items} {source} must go back.",
    ),
    "exchange": (
        "I want to exchange the {items} {source} for {want}.",
        "Can I swap the {items} {source} for {want}?",
        "Please replace the {items} {source} with {want}.",
    ),
}
