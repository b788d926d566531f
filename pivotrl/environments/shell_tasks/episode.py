"""One task at the shell: commands in, their output back; judged by the final files and by the answer that was told."""

from __future__ import annotations

import json
import re

from pivotrl.environments.base import Outcome, Task
from pivotrl.environments.procedural import TurnEpisode
from pivotrl.environments.shell_tasks.machine import Machine, State, initial_state, state_hash
from pivotrl.trajectories.schema import JsonDict, ToolCall

SYSTEM = (
    "You work at a bash shell. Run commands with the tool bash until the task is done. "
    "Then tell the user in one short sentence, with the answer if there is one."
)
TOOLS: list[JsonDict] = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}},
                "required": ["command"],
            },
        },
    }
]


class ShellEpisode(TurnEpisode):
    """See environments.base.Episode. Deterministic for deterministic commands."""

    def __init__(self, task: Task, max_turns: int, machine: Machine) -> None:
        instruction = {"role": "user", "content": task.spec["instruction"]}
        super().__init__(task, max_turns, TOOLS, [{"role": "system", "content": SYSTEM}, instruction])
        self.machine = machine
        self.state: State = initial_state(task.spec["files"])
        self.told: str | None = None  # the last message, which ends the episode
        self.outputs: list[str] = []

    def answer(self, text: str) -> str | None:
        if not text.strip():
            return "[error: the last message was empty]"
        self.told = text
        return None

    def run(self, call: ToolCall) -> str:
        return json.dumps(self._run(call), ensure_ascii=False, separators=(",", ":"))

    def _run(self, call: ToolCall) -> JsonDict:
        if call.name != "bash":
            return {"error": f"no tool {call.name[:40]}; there is bash"}
        command = call.arguments.get("command")
        if set(call.arguments) != {"command"} or not isinstance(command, str) or not command.strip():
            return {"error": "bash takes one argument: command, a string"}
        run = self.machine.run(self.state, command)
        self.state = run.state
        self.outputs.append(str(run.result.get("out", "")))
        return dict(run.result)

    def state_hash(self) -> str:
        return state_hash(self.state)

    def outcome(self) -> Outcome:
        reason = self._reason()
        return Outcome(reason == "ok", reason, {"turns": self.turns})

    def _reason(self) -> str:
        if not self.done:
            return "unfinished"
        if self.told is None:
            return "too_many_turns"
        if (wrong := self._wrong_files()) is not None:
            return wrong
        answer = self.task.spec["answer"]
        if answer is None:
            return "ok"
        if not self._tells(answer):
            return "wrong_answer"
        return "ok" if any(self.outputs) else "answer_not_looked_up"

    def _wrong_files(self) -> str | None:
        """None where the files are the right ones; permissions and empty directories do not matter."""
        goal = {name: content.encode() for name, content in self.task.spec["goal"].items() if not name.endswith("/")}
        found = {name: entry[2] for name, entry in self.state.items() if entry[0] != "5"}
        if found == goal:
            return None
        if self.state == initial_state(self.task.spec["files"]):
            return "nothing_done"
        if missing := set(goal) - set(found):
            return "file_lost" if missing & set(self.task.spec["files"]) else "file_missing"
        return "wrong_content" if set(found) == set(goal) else "surplus_file"

    def _tells(self, answer: str) -> bool:
        """Whether the last message names the answer and no other candidate: a list of guesses is no answer."""
        assert self.told is not None
        if answer.isdecimal():
            names = "|".join(re.escape(name) for name in self.task.spec["files"])
            numbers = re.findall(r"\d+", re.sub(names, " ", self.told))
            return set(numbers) == {answer}
        named = {name for name in self.task.spec["files"] if name.rsplit("/", 1)[-1] in self.told}
        return named == {answer}
