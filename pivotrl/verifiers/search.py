"""Search and browsing: the same queries, the same pages, the same sections, the same answer.

What a role cannot settle by rules (another wording of a goal, another phrasing of an answer) is unscorable, not
wrong: compose `first` over this and `judge`, or set `text_rule`. What it can settle is settled first: another URL is
0 whatever the goal says.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall, Turn
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.calls import tool_schemas
from pivotrl.verifiers.matching import maximum_matching
from pivotrl.verifiers.options import one_of, read_options, within
from pivotrl.verifiers.queries import fold, query_similarity, same_answer, same_query, text_similarity
from pivotrl.verifiers.texts import TextRule, both_speak, make_judge
from pivotrl.verifiers.urls import normalise_url

ROLES: dict[str, tuple[str, ...]] = {
    "query": ("query", "queries", "q", "search_query", "search_queries", "keywords", "search_term", "search_terms"),
    "url": ("url", "urls", "link", "links", "uri", "href"),
    "text": ("goal", "prompt", "instruction", "instructions", "question"),
    "section": ("section", "heading", "title"),
    "ranges": ("ranges", "character_ranges", "input_character_ranges"),
    "answer": ("answer", "final_answer", "final_result"),
    "exact": (),  # everything else: page, offset, ticker, dates, keys
}
_ROLE_OF = {argument: role for role, arguments in ROLES.items() for argument in arguments}
_MISSING = object()
ANSWER = "answer"


class Search:
    """Options:

    `roles`: {tool: {argument: role}}, over the defaults by argument name; roles are query, url, text, section,
    ranges, answer, exact and ignore. `query_rule`: "terms" (the same terms in any order, phrases, operators),
    "ordered", or "similarity" (Dice of the terms >= `query_threshold`; phrases, operators and numbers equal). A list
    of queries or URLs is a multiset: each must be answered by one of its own, and surplus ones count against it.
    `text_rule`: "unscorable" where a goal or prompt reads differently, "similarity" (Dice of the words >=
    `text_threshold`, numbers equal), "exact" or "ignore". `fragment`, `http_is_https`: see urls.normalise_url.
    `range_overlap`: intersection over union that two sets of character ranges must reach. `judge`: options of the LLM
    judge, which is then asked last: about goals and answers that rules do not settle, and queries in other terms.
    `text`: final answers: "answer" (the same short answer, else unscorable), or a rule of `texts`: "exclude", "same",
    "similarity:x", "facts", "judge".
    """

    name = "search"
    version = "2"
    ignores_thinking = True

    def __init__(self, options: dict[str, Any]) -> None:
        o = self.options = read_options(
            self.name,
            options,
            {
                "roles": {},
                "query_rule": "terms",
                "query_threshold": 0.6,
                "text_rule": "unscorable",
                "text_threshold": 0.6,
                "fragment": "routes",
                "http_is_https": False,
                "range_overlap": 1.0,
                "text": ANSWER,
                "judge": None,
            },
        )
        one_of(self.name, "query_rule", o["query_rule"], ("terms", "ordered", "similarity"))
        one_of(self.name, "text_rule", o["text_rule"], ("unscorable", "similarity", "exact", "ignore"))
        one_of(self.name, "fragment", o["fragment"], ("routes", "ignore", "exact"))
        for key in ("query_threshold", "text_threshold", "range_overlap"):
            within(self.name, key, o[key], 0, 1)
        for tool, roles in o["roles"].items():
            for argument, role in dict(roles).items():
                if role not in ROLES and role != "ignore":
                    known = ", ".join([*ROLES, "ignore"])
                    raise UserError(f"verifier search: roles.{tool}.{argument} is {role!r}; it must be one of {known}.")
        self._rules: dict[str, Callable[[Any, Any], bool | None]] = {
            "query": lambda a, b: _matched(a, b, self._query),
            "url": lambda a, b: _matched(a, b, self._url),
            "text": self._text,
            "section": lambda a, b: isinstance(a, str) and isinstance(b, str) and fold(a) == fold(b),
            "ranges": self._ranges,
            "answer": lambda a, b: same_answer(a, b) if isinstance(a, str) and isinstance(b, str) else False,
        }

        self._judge = make_judge(o)
        self._text_rule = TextRule("verifier search: options", o["text"], self._judge, own=(ANSWER,))

    def config(self) -> dict[str, Any]:
        made = {**self.options, "roles": {tool: dict(roles) for tool, roles in self.options["roles"].items()}}
        del made["judge"]  # left out when off
        return made | ({"judge": self._judge.config()} if self._judge else {})

    def verify(self, turn: Turn, action: Action) -> Verdict:
        verdict = self.by_rules(turn, action)
        if self._judge is None or not self._is_open(turn, verdict):
            return verdict
        said = self._judge.verify(turn, action)
        return Verdict(said.reward, said.reason, {**said.details, "rules": verdict.reason})

    def _is_open(self, turn: Turn, verdict: Verdict) -> bool:
        """Whether a judge may have the last word: what rules leave open, and queries that they only read as text."""
        if verdict.reward is None:
            return "not_settled" in verdict.reason
        reason, _, argument = verdict.reason.partition(":")
        roles = [self.options["roles"].get(call.name) or {} for call in turn.demonstration.tool_calls]
        return reason == "argument_differs" and any(
            (role.get(argument) or _ROLE_OF.get(argument)) == "query" for role in roles
        )

    def by_rules(self, turn: Turn, action: Action) -> Verdict:
        """The verdict without the judge."""
        if action.problems:
            return Verdict(0.0, "malformed", {"problems": list(action.problems)})
        expected, actual = turn.demonstration.tool_calls, action.tool_calls
        if self.options["text"] != ANSWER and both_speak(turn, action):
            return self._text_rule.verify(turn, action)
        if not expected:
            if actual:
                return Verdict(0.0, "call_for_answer")
            same = same_answer(turn.demonstration.text, action.text)
            return _verdict(same, "answer_differs", "answer_not_settled")
        if not actual:
            return Verdict(0.0, "empty" if not action.text.strip() else "answer_for_call")
        if len(expected) != len(actual):
            return Verdict(0.0, "number_of_calls", {"expected": len(expected), "actual": len(actual)})
        schemas = tool_schemas(turn)
        try:
            table = [[self._call(e, a, schemas.get(e.name, {})) for a in actual] for e in expected]
        except (RecursionError, ValueError) as error:
            return Verdict(None, "not_comparable", {"error": f"{type(error).__name__}: {error}"[:200]})
        for settled, said in ((True, (True,)), (None, (True, None))):
            edges = [[j for j, (same, _) in enumerate(row) if same in said] for row in table]
            if len(maximum_matching(edges)) == len(expected):
                reasons = sorted({reason for row in table for same, reason in row if same is None})
                return Verdict(1.0, "match") if settled else Verdict(None, reasons[0], {"arguments": reasons})
        first = next((reason for row in table for same, reason in row if same is False), "calls_differ")
        return Verdict(0.0, first)

    def _call(self, expected: ToolCall, actual: ToolCall, schema: JsonDict) -> tuple[bool | None, str]:
        """Same, different or not settled; and which argument says so."""
        if expected.name != actual.name:
            return False, "wrong_tool"
        declared_all = schema.get("properties")
        known: JsonDict = declared_all if isinstance(declared_all, dict) else {}
        roles = self.options["roles"].get(expected.name) or {}
        open_question = ""
        for key in {**expected.arguments, **actual.arguments}:
            role = roles.get(key) or _ROLE_OF.get(key, "exact")
            if role == "ignore":
                continue
            declared = known.get(key)
            property_schema: JsonDict = declared if isinstance(declared, dict) else {}
            default = property_schema.get("default", _MISSING)
            a, b = expected.arguments.get(key, default), actual.arguments.get(key, default)
            if a is _MISSING or b is _MISSING:
                return False, f"extra_argument:{key}" if a is _MISSING else f"missing_argument:{key}"
            same = same_json(a, b, property_schema) or self._rules.get(role, _differs)(a, b)
            if same is False:
                return False, f"argument_differs:{key}"
            if same is None:
                open_question = open_question or f"argument_not_settled:{key}"
        return (None, open_question) if open_question else (True, "match")

    def _query(self, one: Any, two: Any) -> bool:
        if not (isinstance(one, str) and isinstance(two, str)) or not two.strip():
            return False
        if self.options["query_rule"] == "similarity":
            return same_query(one, two) or query_similarity(one, two) >= self.options["query_threshold"] > 0
        return same_query(one, two, ordered=self.options["query_rule"] == "ordered")

    def _url(self, one: Any, two: Any) -> bool:
        if not (isinstance(one, str) and isinstance(two, str)):
            return False
        kind, plain = self.options["fragment"], self.options["http_is_https"]
        return normalise_url(one, fragment=kind, http_is_https=plain) == normalise_url(
            two, fragment=kind, http_is_https=plain
        )

    def _text(self, one: Any, two: Any) -> bool | None:
        rule = self.options["text_rule"]
        if not (isinstance(one, str) and isinstance(two, str)) or (one.strip() and not two.strip()):
            return False
        if rule == "ignore" or fold(one) == fold(two):
            return True
        if rule == "similarity":
            return text_similarity(one, two) >= self.options["text_threshold"] > 0
        return None if rule == "unscorable" else False

    def _ranges(self, one: Any, two: Any) -> bool:
        """Reads by what they cover: [{key, start, end}, ...] as a union of half-open intervals a key.

        Reading a part twice is more reading: the lengths as written must agree too.
        """
        a, b = _intervals(one), _intervals(two)
        if a is None or b is None:
            return False
        written = sorted(sum(row["end"] - row["start"] for row in rows) for rows in (one, two))
        if written[0] < written[1] * self.options["range_overlap"]:
            return False
        shared = sum(_overlap(a[key], b[key]) for key in a.keys() & b.keys())
        sizes = [sum(end - start for spans in x.values() for start, end in spans) for x in (a, b)]
        union = sum(sizes) - shared
        return a.keys() == b.keys() and (shared / union >= self.options["range_overlap"] if union else True)


def same_json(a: Any, b: Any, schema: Any = None) -> bool:
    """Equal JSON values. true is not 1; 1 is 1.0 only where the schema says number; lists in order, keys in any."""
    schema = schema if isinstance(schema, dict) else {}
    if type(a) is not type(b):
        kinds = schema.get("type")
        number = "number" in (kinds if isinstance(kinds, list) else [kinds])
        return number and {type(a), type(b)} == {int, float} and bool(a == b)
    if isinstance(a, dict):
        inner: JsonDict = schema["properties"] if isinstance(schema.get("properties"), dict) else {}
        return a.keys() == b.keys() and all(same_json(a[k], b[k], inner.get(k)) for k in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(same_json(x, y, schema.get("items")) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def _differs(one: Any, two: Any) -> bool:
    return False


def _verdict(same: bool | None, different: str, unsettled: str) -> Verdict:
    if same is None:
        return Verdict(None, unsettled)
    return Verdict(1.0, "match") if same else Verdict(0.0, different)


def _matched(one: Any, two: Any, same: Callable[[Any, Any], bool]) -> bool:
    """`same` of two values, or of two lists as multisets."""
    if not (isinstance(one, list) and isinstance(two, list)):
        return same(one, two)
    if len(one) != len(two):
        return False
    return len(maximum_matching([[j for j, b in enumerate(two) if same(a, b)] for a in one])) == len(one)


def _intervals(value: Any) -> dict[str, list[tuple[float, float]]] | None:
    """Merged intervals by key; None where a row is no range."""
    spans: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for row in value if isinstance(value, list) else [None]:
        if not isinstance(row, dict) or set(row) - {"key", "start", "end"}:
            return None
        start, end = row.get("start"), row.get("end")
        if type(start) is not int or type(end) is not int or not 0 <= start <= end:
            return None
        spans[json.dumps(row.get("key"), sort_keys=True)].append((start, end))
    merged: dict[str, list[tuple[float, float]]] = {}
    for key, found in spans.items():
        out: list[tuple[float, float]] = []
        for start, end in sorted(found):
            if out and start <= out[-1][1]:
                out[-1] = (out[-1][0], max(out[-1][1], end))
            else:
                out.append((start, end))
        merged[key] = out
    return merged


def _overlap(one: list[tuple[float, float]], two: list[tuple[float, float]]) -> float:
    return sum(max(0, min(a[1], b[1]) - max(a[0], b[0])) for a in one for b in two)
