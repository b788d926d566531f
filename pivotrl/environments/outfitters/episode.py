"""One dialogue: agent actions in; tool results and the customer's replies out; judged by state and by what was told."""

from __future__ import annotations

import copy
from random import Random

from pivotrl.environments.base import Outcome, Task
from pivotrl.environments.outfitters import rules, shop
from pivotrl.environments.outfitters.tasks import NAME, VERSION
from pivotrl.environments.outfitters.user import Customer, says_answer, says_outcome
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall


class OutfittersEpisode:
    """See environments.base.Episode. Deterministic: the same actions give the same messages."""

    def __init__(self, task: Task, max_turns: int) -> None:
        self.task = task
        self.max_turns = max_turns
        self.tools = shop.TOOLS
        self.db: JsonDict = copy.deepcopy(task.spec["db"])
        request = task.spec["request"]
        self.right = rules.right_write(task.spec["db"], request)
        self.answer = rules.right_answer(task.spec["db"], request)
        spec = {**task.spec, "answer": self.answer}
        self.customer = Customer(spec, Random(f"{NAME}/{VERSION}/customer/{task.id}"))
        self.messages: list[JsonDict] = [
            {"role": "system", "content": shop.POLICY},
            {"role": "user", "content": self.customer.opening()},
        ]
        self.turns = 0
        self.done = False
        self.writes: list[ToolCall] = []  # carried out, in order
        self.premature = False  # a change before the customer's yes
        self.seen: set[str] = set()  # ids and products looked up
        self.told = ""  # the agent's last text
        self._last_write: tuple[ToolCall, JsonDict] | None = None
        self._calls = 0

    def step(self, action: Action) -> None:
        """Append the assistant turn and what follows it. Total; a finished episode takes no more actions."""
        if self.done:
            return
        self.turns += 1
        if action.tool_calls:
            self._call_turn(action)
        else:
            self._text_turn(action)
        if self.turns >= self.max_turns:
            self.done = True

    def _text_turn(self, action: Action) -> None:
        self.messages.append({"role": "assistant", "content": action.text})
        if action.problems:
            problem = "; ".join(map(str, action.problems))[:120]
            reply: str | None = f"[error: the last message could not be read ({problem}); write it again]"
        elif not action.text.strip():
            reply = self.customer.silence()
        else:
            self.told = action.text
            reply = self.customer.reply(action.text, self._last_write)
        if reply is None:
            self.done = True
        else:
            self.messages.append({"role": "user", "content": reply})

    def _call_turn(self, action: Action) -> None:
        calls = []
        for call in action.tool_calls:
            calls.append({"id": f"call_{self._calls}", "name": call.name, "arguments": copy.deepcopy(call.arguments)})
            self._calls += 1
        message: JsonDict = {"role": "assistant", "tool_calls": calls}
        if action.text.strip():
            message["content"] = action.text
        self.messages.append(message)
        for row, call in zip(calls, action.tool_calls, strict=True):
            # A turn that could be read only in part is carried out not at all: its intent is not known.
            result = {"error": "not run: part of the message could not be read"} if action.problems else self._run(call)
            content = shop.compact(result)
            self.messages.append({"role": "tool", "tool_call_id": row["id"], "name": call.name, "content": content})

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
        return shop.state_hash(self.db)

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
        if self.right is not None:
            assert self._last_write is not None  # the state differs from the first one
            return "ok" if says_outcome(self.told, *self._last_write) else "user_not_told"
        request = self.task.spec["request"]
        if not says_answer(self.told, request["topic"], str(self.answer)):
            return "wrong_answer"
        source = shop.product_of(request["sku"]) if request["topic"] == "stock" else request["order"]
        return "ok" if source in self.seen else "answer_not_looked_up"

    def _wrong_state(self) -> str | None:
        """None where the final state is the right one, else what is wrong with it."""
        expected = copy.deepcopy(self.task.spec["db"])
        if self.right is not None:
            shop.execute(expected, self.right)
        if shop.state_hash(expected) == self.state_hash():
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
