"""One dialogue: agent actions in; tool results and the customer's replies out; judged by state and by what was told."""

from __future__ import annotations

import copy
import hashlib
from random import Random

from pivotrl.environments.base import Outcome, Task
from pivotrl.environments.outfitters import rules, shop
from pivotrl.environments.outfitters.tasks import NAME, VERSION
from pivotrl.environments.outfitters.truth import untruth
from pivotrl.environments.outfitters.user import ORDER_ID, SKU, Customer, says_answer, says_outcome
from pivotrl.environments.procedural import TurnEpisode
from pivotrl.trajectories.schema import JsonDict, ToolCall


class OutfittersEpisode(TurnEpisode):
    """See environments.base.Episode. Deterministic: the same actions give the same messages."""

    def __init__(self, task: Task, max_turns: int) -> None:
        request = task.spec["request"]
        self.db: JsonDict = copy.deepcopy(task.spec["db"])
        self.right = rules.right_write(task.spec["db"], request)
        self.right_answer = rules.right_answer(task.spec["db"], request)
        spec = {**task.spec, "answer": self.right_answer}
        self.customer = Customer(spec, Random(f"{NAME}/{VERSION}/customer/{task.id}"))
        opening = {"role": "user", "content": self.customer.opening()}
        super().__init__(task, max_turns, shop.TOOLS, [{"role": "system", "content": shop.POLICY}, opening])
        self.writes: list[ToolCall] = []  # carried out, in order
        self.premature = False  # a change before the customer's yes
        self.seen: set[str] = set()  # ids and products looked up
        self.told = ""  # the agent's last text
        self.untrue: str | None = None  # the first thing that was told and is not so
        self._misled: set[str] = set()  # other orders that the customer has agreed to unknowingly
        self._last_write: tuple[ToolCall, JsonDict] | None = None

    def answer(self, text: str) -> str | None:
        if not text.strip():
            return self.customer.silence()
        self.told = text
        request, agreed = self.task.spec["request"], self.customer.agreed
        found = untruth(text, self.messages, self.db["orders"], request.get("order"), self.writes)
        self.untrue = self.untrue or found
        reply = self.customer.reply(text, self._last_write)
        named = set(ORDER_ID.findall(text))
        if self.customer.agreed and not agreed and named and request["order"] not in named:
            self._misled |= named
        return reply

    def run(self, call: ToolCall) -> str:
        return shop.compact(self._run(call))

    def _run(self, call: ToolCall) -> JsonDict:
        result = shop.execute(self.db, call)
        if "error" in result:
            return result
        if call.name in shop.WRITES:
            self.premature |= call.name != "transfer_to_human" and not self.customer.agreed
            self.writes.append(call)
            self._last_write = (call, result)
        else:
            self.seen.update(map(str, call.arguments.values()))
        return result

    def state_hash(self) -> str:
        """Of the database, and of what the customer believes wrongly."""
        state = shop.state_hash(self.db)
        believed = [*([self.untrue] if self.untrue else []), *sorted(self._misled)]
        return hashlib.sha256(" ".join([state, *believed]).encode()).hexdigest() if believed else state

    def outcome(self) -> Outcome:
        reason = self._reason()
        details = {"turns": self.turns, "writes": [call.to_json() for call in self.writes]}
        return Outcome(reason == "ok", reason, details)

    def _reason(self) -> str:
        if not self.done:
            return "unfinished"
        if (wrong := self._wrong_state()) is not None:
            return wrong
        if not self.customer.served:
            return "too_many_turns"
        if self.premature:
            return "premature_write"
        return self._wrong_telling() or ("untrue" if self.untrue else "ok")

    def _wrong_telling(self) -> str | None:
        """What is wrong with the last text; None where it tells the outcome, or the answer, as looked up."""
        if self.right is not None:
            assert self._last_write is not None  # the state differs from the first one
            return None if says_outcome(self.told, *self._last_write) else "user_not_told"
        request = self.task.spec["request"]
        stock = request["topic"] == "stock"
        of_others = stock and any(sku != request["sku"] for sku in SKU.findall(self.told))
        if of_others or not says_answer(self.told, request["topic"], str(self.right_answer)):
            return "wrong_answer"
        source = shop.product_of(request["sku"]) if stock else request["order"]
        return None if source in self.seen else "answer_not_looked_up"

    def _wrong_state(self) -> str | None:
        """None where the final state is the right one, else what is wrong with it."""
        expected = copy.deepcopy(self.task.spec["db"])
        if self.right is not None:
            shop.execute(expected, self.right)
        if shop.state_hash(expected) == shop.state_hash(self.db):
            return None
        if not self.writes:
            if self.customer.claimed:
                return "false_claim"
            return "missing_write" if self.customer.served else "too_many_turns"
        return self._wrong_write()

    def _wrong_write(self) -> str:
        if self.right is None:
            return "unwanted_write"
        transfers = [call.name == "transfer_to_human" for call in self.writes]
        if self.right.name == "transfer_to_human":
            return "wrong_reason" if all(transfers) else "forbidden_write"
        if any(transfers):
            return "needless_transfer"
        if any(call.name != self.right.name for call in self.writes):
            return "wrong_tool"
        if len(self.writes) > 1:
            return "several_writes"
        done, right = self.writes[0].arguments, self.right.arguments
        names = {"item": "items", "new_item": "variant", "to": "method"}
        for key in right:
            # Items may be named in any order.
            same = sorted(done[key]) == sorted(right[key]) if key == "items" else done[key] == right[key]
            if not same:
                return f"wrong_{names.get(key, key)}"  # order, items, variant, method, address
        return "wrong_state"
