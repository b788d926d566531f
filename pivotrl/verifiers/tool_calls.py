"""Functional verifier of conversational tool use: "speak or call", tool name, arguments (method.md 2.1, eq. 6).

Calls are compared as a multiset, so order does not matter and surplus calls are not free; a text beside calls is free.
Where both speak, the option `text` decides (see `texts`), by default `exclude`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pivotrl.errors import UserError
from pivotrl.strict import suggestion
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall, Turn
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.compare import Difference, Rules, difference, perfect_match, resolve
from pivotrl.verifiers.strings import StringRule, exact, string_rule
from pivotrl.verifiers.texts import EXCLUDE, TextRule, make_judge

WHERE = "domain.verifier.options"
_JUDGE = "judge"


def check_option_names(options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise `UserError` for an unknown option, with the nearest known one."""
    for name in options:
        if name not in known:
            hint = suggestion(str(name), list(known)) or f" Known: {', '.join(known) or 'none'}."
            raise UserError(f"{WHERE}.{name}: unknown option.{hint}")


class ToolCallVerifier:
    """See the module. Options: `strings` {"*" or "tool.field": rule}, `unordered`, `text`, `judge`.

    A field with the string rule "judge" takes other words where all else is equal and the LLM judge, whose options are
    in `judge`, calls the actions equivalent.
    `unordered` names lists whose order does not matter: "tool.field", or "tool.field+other" for lists that belong
    together item by item, whose pairs may come in any order.
    """

    name = "tool_calls"
    version = "3"

    def __init__(self, options: Mapping[str, Any]) -> None:
        check_option_names(options, ("strings", "unordered", "text", "judge"))
        strings = options.get("strings") or {}
        if not isinstance(strings, Mapping):
            raise UserError(f'{WHERE}.strings: must map "*" or "tool.field" to a rule, not a {type(strings).__name__}.')
        self._strings: dict[str, StringRule] = {
            str(field): exact if rule == _JUDGE else string_rule(rule, f"{WHERE}.strings[{field!r}]")
            for field, rule in strings.items()
        }
        judged = {str(field) for field, rule in strings.items() if rule == _JUDGE}
        unordered = options.get("unordered") or []
        if isinstance(unordered, str) or not all(isinstance(field, str) for field in unordered):
            raise UserError(f'{WHERE}.unordered: must be a list of "tool.field" names.')
        self._unordered = frozenset(field for field in unordered if "+" not in field)
        self._paired = _paired_lists([field for field in unordered if "+" in field])
        self._judge = make_judge(options)
        self._text = TextRule(WHERE, options.get("text") or EXCLUDE, self._judge)
        self._options = {
            "strings": {str(field): rule for field, rule in sorted(strings.items())},
            "unordered": sorted(unordered),
            "text": self._text.rule,
        }
        self._rules = self._rules_of(self._strings)
        anything = string_rule("any", WHERE)
        self._open_rules = self._rules_of({**self._strings, **dict.fromkeys(judged, anything)}) if judged else None
        if judged and self._judge is None:
            raise UserError(f"{WHERE}.judge is missing: {', '.join(sorted(judged))} asks the judge.")

    def _rules_of(self, strings: dict[str, StringRule]) -> Rules:
        default = strings.get("*", exact)
        return Rules(lambda path: strings.get(path, default), lambda path: path in self._unordered)

    def config(self) -> dict[str, Any]:
        return self._options | ({"judge": self._judge.config()} if self._judge else {})

    def verify(self, turn: Turn, action: Action) -> Verdict:
        expected = turn.demonstration
        if action.problems:
            return Verdict(0.0, "malformed", {"problems": list(action.problems)})
        if expected.tool_calls and action.tool_calls:
            verdict = self._verify_calls(turn, expected.tool_calls, action.tool_calls, self._rules)
            if verdict.reward == 1.0 or self._open_rules is None or self._judge is None:
                return verdict
            but_words = self._verify_calls(turn, expected.tool_calls, action.tool_calls, self._open_rules)
            return self._judge.verify(turn, action) if but_words.reward == 1.0 else verdict
        if action.tool_calls:
            return Verdict(0.0, "called_instead_of_speaking")
        if not action.text.strip():
            return Verdict(0.0, "empty")
        if expected.tool_calls:
            return Verdict(0.0, "spoke_instead_of_calling")
        return self._text.verify(turn, action)

    def _verify_calls(
        self, turn: Turn, expected: tuple[ToolCall, ...], actual: tuple[ToolCall, ...], rules: Rules
    ) -> Verdict:
        schemas = _parameters(turn.tools)
        known = schemas.keys() | {call.name for call in expected}
        for call in actual:
            if call.name not in known:
                return Verdict(0.0, "unknown_tool", {"tool": call.name})
        if len(actual) != len(expected):
            return Verdict(0.0, "surplus_call" if len(actual) > len(expected) else "missing_call")
        if sorted(call.name for call in actual) != sorted(call.name for call in expected):
            return Verdict(0.0, "wrong_tool", {"tools": [call.name for call in actual]})

        def same(a: ToolCall, b: ToolCall) -> bool:
            return a.name == b.name and self._difference(a, b, schemas, rules) is None

        if perfect_match(expected, actual, same):
            return Verdict(1.0, "match")
        return self._first_difference(expected, actual, schemas, rules)

    def _difference(
        self, expected: ToolCall, actual: ToolCall, schemas: dict[str, JsonDict], rules: Rules
    ) -> Difference | None:
        root = schemas.get(expected.name, {})
        left, right = expected.arguments, actual.arguments
        for fields in self._paired.get(expected.name, ()):
            left, right = _in_one_order(left, fields), _in_one_order(right, fields)
        return difference(left, right, resolve(root, root), root, rules, expected.name)

    def _first_difference(
        self,
        expected: tuple[ToolCall, ...],
        actual: tuple[ToolCall, ...],
        schemas: dict[str, JsonDict],
        rules: Rules,
    ) -> Verdict:
        """Name a difference for people: that of the first call which equals no expected call of its name."""
        for call in actual:
            found = [self._difference(e, call, schemas, rules) for e in expected if e.name == call.name]
            if found[0] is not None and None not in found:
                return Verdict(0.0, found[0].reason, {"field": found[0].path})
        return Verdict(0.0, "repeated_call")


def _paired_lists(names: list[str]) -> dict[str, list[tuple[str, ...]]]:
    """Tool -> groups of arguments, from "tool.field+other"."""
    groups: dict[str, list[tuple[str, ...]]] = {}
    for name in names:
        tool, dot, fields = name.partition(".")
        if not dot or not all(fields.split("+")):
            raise UserError(f'{WHERE}.unordered has {name!r}; write "tool.field+other".')
        groups.setdefault(tool, []).append(tuple(fields.split("+")))
    return groups


def _in_one_order(arguments: JsonDict, fields: tuple[str, ...]) -> JsonDict:
    """The lists of `fields` sorted together, item by item; unchanged where they are no lists of one length."""
    lists = [found for field in fields if isinstance(found := arguments.get(field), list)]
    if len(lists) != len(fields) or len({len(found) for found in lists}) != 1 or not lists[0]:
        return arguments
    rows = sorted(zip(*lists, strict=True), key=lambda row: json.dumps(row, sort_keys=True))
    return {**arguments, **{field: list(column) for field, column in zip(fields, zip(*rows, strict=True), strict=True)}}


def _parameters(tools: list[JsonDict]) -> dict[str, JsonDict]:
    """Tool name -> JSON Schema of its arguments."""
    functions = [tool.get("function", {}) for tool in tools]
    return {
        f["name"]: f["parameters"] if isinstance(f.get("parameters"), dict) else {} for f in functions if "name" in f
    }
