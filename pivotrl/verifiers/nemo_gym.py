"""The rules of NeMo-Gym under their names, so that its numbers can be reproduced. Baselines, with their weaknesses.

Written from the published behaviour (method.md 4.3, 4.4); `swe_pivot` is in nemo_gym_swe.py. Do not train on them
without knowing what they let through; each class lists it, and the tests pin it. Two differences are deliberate: an
action with `problems` (what it was parsed from is malformed) is 0 here, and where those servers fail with an
exception, this is unscorable.
"""

from __future__ import annotations

import json
from collections import Counter
from difflib import SequenceMatcher
from typing import Any

import jsonschema

from pivotrl.trajectories.schema import Action, ToolCall, Turn
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.matching import maximum_matching
from pivotrl.verifiers.options import one_of, read_options, within


class SingleStepToolUse:
    """Tool name, key sets, types and a bag of words (method.md 4.3).

    Strings: lower-cased white-space words. If either side has fewer than two, they must be equal as written; else
    |multiset intersection| / (n + m) >= threshold. That is *half* of Dice: identical strings score 0.5, so any
    threshold above 0.5 rejects the demonstration itself, and 0.0 accepts any two texts of two words.

    Options: `word_count_similarity_threshold` (published: 0.1 conversational and function calling, 0.3 search, 0.0
    SWE), `floating_point_comparison_threshold`, `parallel_tool_call_rewarding` and, where that is true,
    `allow_subset`, `allow_superset`, `parallel_tool_call_reward_mode` ("binary_strict" | "fractional" | "f1").

    Lets through: any text where a text was demonstrated; surplus calls (parallel_tool_call_rewarding false); words in
    any order (`cp a b` = `cp b a`); true for 1. Rejects wrongly: 1 for 1.0, a default written out.
    """

    name = "single_step_tool_use_with_argument_comparison"
    version = "1"
    ignores_thinking = True

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = read_options(
            self.name,
            options,
            {
                "word_count_similarity_threshold": 0.1,
                "floating_point_comparison_threshold": 1e-6,
                "parallel_tool_call_rewarding": False,
                "allow_subset": False,
                "allow_superset": False,
                "parallel_tool_call_reward_mode": "f1",
            },
        )
        mode = self.options["parallel_tool_call_reward_mode"]
        one_of(self.name, "parallel_tool_call_reward_mode", mode, ("binary_strict", "fractional", "f1"))
        within(self.name, "word_count_similarity_threshold", self.options["word_count_similarity_threshold"], 0, 1)

    def config(self) -> dict[str, Any]:
        return dict(self.options)

    def verify(self, turn: Turn, action: Action) -> Verdict:
        expected, actual = turn.demonstration.tool_calls, action.tool_calls
        if action.problems:
            return Verdict(0.0, "malformed", {"problems": list(action.problems)})
        if not actual and not action.text:
            return Verdict(0.0, "no_action")
        if not expected:
            return Verdict(0.0, "call_for_message") if actual else Verdict(1.0, "any_message")
        if not actual:
            return Verdict(0.0, "message_for_call")
        try:
            return self._calls(expected, actual)
        except (RecursionError, ValueError, OverflowError) as error:
            return Verdict(None, "not_comparable", {"error": f"{type(error).__name__}: {error}"[:200]})

    def _calls(self, expected: tuple[ToolCall, ...], actual: tuple[ToolCall, ...]) -> Verdict:
        o = self.options
        parallel = o["parallel_tool_call_rewarding"] and (len(expected), len(actual)) != (1, 1)
        if parallel and (
            (len(actual) < len(expected) and not o["allow_subset"])
            or (len(actual) > len(expected) and not o["allow_superset"])
        ):
            return Verdict(0.0, "number_of_calls")
        edges = [
            [j for j, a in enumerate(actual) if e.name == a.name and self._same(e.arguments, a.arguments)]
            for e in expected
        ]
        matched = len(maximum_matching(edges))
        details = {"matched": matched, "expected": len(expected), "actual": len(actual)}
        reward = float(matched == len(expected))
        if parallel:
            required = min(len(expected), len(actual)) if o["allow_subset"] else len(expected)
            mode = o["parallel_tool_call_reward_mode"]
            reward = float(matched == required)
            if mode == "fractional":
                reward = matched / required
            elif mode == "f1":
                reward = 2 * matched / (len(expected) + len(actual))
        return Verdict(reward, "match" if reward == 1 else "partial" if reward else "calls_differ", details)

    def _same(self, expected: Any, actual: Any) -> bool:
        if not isinstance(actual, type(expected)):  # a bool passes as an int; an int does not as a float
            return False
        if isinstance(expected, dict):
            return expected.keys() == actual.keys() and all(self._same(v, actual[k]) for k, v in expected.items())
        if isinstance(expected, list):
            return len(expected) == len(actual) and all(map(self._same, expected, actual))
        if isinstance(expected, float):
            return bool(abs(expected - actual) < self.options["floating_point_comparison_threshold"])
        if isinstance(expected, str):
            words, others = expected.lower().split(), actual.lower().split()
            if min(len(words), len(others)) < 2:
                return bool(expected == actual)
            shared = (Counter(words) & Counter(others)).total()
            return bool(shared / (len(words) + len(others)) >= self.options["word_count_similarity_threshold"])
        return bool(expected == actual)


def _terminus_schema(texts: tuple[str, ...], done: str, done_required: bool, command: dict[str, Any]) -> dict[str, Any]:
    commands = {
        "type": "array",
        "items": {
            "type": "object",
            "properties": command,
            "required": [key for key in command if key != "duration"],
            "additionalProperties": False,
        },
    }
    return {
        "type": "object",
        "properties": {**{t: {"type": "string"} for t in texts}, "commands": commands, done: {"type": "boolean"}},
        "required": [*texts, "commands", *([done] if done_required else [])],
        "additionalProperties": False,
    }


_STRING, _NUMBER, _BOOLEAN = ({"type": kind} for kind in ("string", "number", "boolean"))
TERMINUS_SCHEMAS = {
    "terminus_1": _terminus_schema(
        ("state_analysis", "explanation"),
        "is_task_complete",
        True,
        {"keystrokes": _STRING, "is_blocking": _BOOLEAN, "timeout_sec": _NUMBER},
    ),
    "terminus_2": _terminus_schema(
        ("analysis", "plan"), "task_complete", False, {"keystrokes": _STRING, "duration": _NUMBER}
    ),
}


class TerminusJudge:
    """Terminus actions written as JSON text, in string-only mode (method.md 4.4); reward 0 or 1.

    The action must parse, pass the harness's schema (no additional keys) and be complete where the demonstration is;
    then difflib's ratio of the keystrokes, joined by a space, must reach the threshold.

    Options: `harness` ("terminus_1" | "terminus_2"), `threshold` (published: 0.95, and 0.9 for the string-only
    variants). For the judge that follows there, compose `first` with `settles: accepted` and the verifier `judge`.

    Lets through: a false claim of completion; at 0.9, one changed operand in a long command. Rejects wrongly: any other
    way of writing the same command.
    """

    name = "terminus_judge"
    version = "1"
    ignores_thinking = True

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = read_options(self.name, options, {"harness": "terminus_2", "threshold": 0.95})
        one_of(self.name, "harness", self.options["harness"], tuple(TERMINUS_SCHEMAS))
        within(self.name, "threshold", self.options["threshold"], 0, 1)
        self._validator = jsonschema.Draft202012Validator(TERMINUS_SCHEMAS[self.options["harness"]])

    def config(self) -> dict[str, Any]:
        return dict(self.options)

    def verify(self, turn: Turn, action: Action) -> Verdict:
        if action.problems:
            return Verdict(0.0, "malformed", {"problems": list(action.problems)})
        try:
            expected = json.loads(turn.demonstration.text)
            if not self._validator.is_valid(expected):
                return Verdict(None, "demonstration_schema")
        except (ValueError, RecursionError):
            return Verdict(None, "demonstration_not_json")
        try:
            actual = json.loads(action.text.rpartition("</think>")[2])
            valid = self._validator.is_valid(actual)
        except (ValueError, RecursionError):
            return Verdict(0.0, "not_json")
        if not valid:
            return Verdict(0.0, "schema")
        done = [bool(row.get("task_complete") or row.get("is_task_complete")) for row in (expected, actual)]
        if done == [True, False]:
            return Verdict(0.0, "not_complete")
        keys = [[command["keystrokes"] for command in row["commands"]] for row in (expected, actual)]
        if bool(keys[0]) != bool(keys[1]):
            return Verdict(0.0, "similarity", {"ratio": 0.0})
        ratio = SequenceMatcher(None, " ".join(keys[0]), " ".join(keys[1])).ratio()
        matched = ratio >= self.options["threshold"]
        return Verdict(float(matched), "match" if matched else "similarity", {"ratio": ratio})
