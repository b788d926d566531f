"""Changes of a demonstrated action whose meaning is known: the same thing written otherwise, another thing, an exploit.

What is certain for any tool with a schema is labelled. Whether the order of a list or the case of a text matters
depends on the tool: those changes are probes, whose meaning only execution can tell.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from pivotrl.trajectories.schema import Action, JsonDict, ToolCall, Turn
from pivotrl.verifiers.calls import tool_schemas
from pivotrl.verifiers.canonical import canonical_action
from pivotrl.verifiers.edit_calls import edit_call
from pivotrl.verifiers.shell import SHELL_TOOLS

PRESERVING, BREAKING, EXPLOIT = "preserving", "breaking", "exploit"
PROBE = "probe"  # may or may not do the same: counted only where execution says which
_DIGITS = re.compile(r"[0-9]+")
_LIST_MARK = re.compile(r"^\s*([0-9]+)[.)]\s", re.MULTILINE)
_MOST_VALUES = 5  # of a text, that are changed one at a time
_INVENTED = "90417"


@dataclass(frozen=True)
class Mutation:
    """`kind` says what was done; `effect` whether the action still does the same ("preserving") or not."""

    kind: str
    effect: str
    action: Action
    where: str = ""  # "call 0, argument city"
    certain: bool = False  # an execution that finds no difference has not looked: users of key words, say


def mutations(turn: Turn) -> list[Mutation]:
    """All mutations that apply to the demonstration, without those that changed nothing. Deterministic."""
    action = turn.demonstration
    found = [*_preserving(turn), *_breaking(turn), *_exploits(turn)]
    original = exact(action)
    return [m for m in found if m.kind in ("key_order", "reparsed") or exact(m.action) != original]


def exact(action: Action) -> str:
    """The action as one text in which 1, 1.0 and true differ and the order of keys does not."""
    return json.dumps([action.to_json()], sort_keys=True)


# --- meaning kept


def _preserving(turn: Turn) -> Iterator[Mutation]:
    action, schemas = turn.demonstration, tool_schemas(turn)

    def each(kind: str, change: Callable[[ToolCall, JsonDict], JsonDict]) -> Iterator[Mutation]:
        calls = tuple(ToolCall(c.name, change(c, schemas.get(c.name, {}))) for c in action.tool_calls)
        if calls:
            yield Mutation(kind, PRESERVING, replace(action, tool_calls=calls))

    yield from each("key_order", lambda call, _: _reversed_keys(call.arguments))
    yield from each("reparsed", lambda call, _: json.loads(json.dumps(call.arguments, indent=2)))  # white space in JSON
    yield from each("defaults_written", lambda call, schema: _with_defaults(call.arguments, schema))
    yield from each("integer_as_float", lambda call, schema: _floats(call.arguments, schema))
    yield Mutation("other_thinking", PRESERVING, replace(action, thinking="Let me think about this again."))
    if len(action.tool_calls) > 1:
        ordered = any(call.name in SHELL_TOOLS or edit_call(call, None) for call in action.tool_calls)
        effect = PROBE if ordered else PRESERVING  # of commands and edits the order may decide
        yield Mutation("calls_reversed", effect, replace(action, tool_calls=action.tool_calls[::-1]))
    if not action.tool_calls:
        yield Mutation("outer_white_space", PRESERVING, replace(action, text=f"\n{action.text} \n"))


def _reversed_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _reversed_keys(inner) for key, inner in reversed(value.items())}
    return [_reversed_keys(inner) for inner in value] if isinstance(value, list) else value


def _properties(schema: Any) -> dict[str, JsonDict]:
    found = schema.get("properties") if isinstance(schema, dict) else None
    return {k: v for k, v in found.items() if isinstance(v, dict)} if isinstance(found, dict) else {}


def _with_defaults(arguments: JsonDict, schema: JsonDict) -> JsonDict:
    defaults = {k: v["default"] for k, v in _properties(schema).items() if "default" in v and k not in arguments}
    return {**arguments, **defaults}


def _floats(value: Any, schema: Any) -> Any:
    """1 -> 1.0 where the schema says number."""
    if isinstance(value, dict):
        known = _properties(schema)
        return {k: _floats(v, known.get(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_floats(v, schema.get("items") if isinstance(schema, dict) else None) for v in value]
    is_number = isinstance(schema, dict) and schema.get("type") == "number"
    return float(value) if is_number and type(value) is int and abs(value) < 2**53 else value


# --- meaning changed


def _breaking(turn: Turn) -> Iterator[Mutation]:
    action, schemas = turn.demonstration, tool_schemas(turn)
    calls = action.tool_calls

    def put(kind: str, i: int, where: str = "", **change: Any) -> Mutation:
        mutated = (*calls[:i], replace(calls[i], **change), *calls[i + 1 :])
        return Mutation(kind, BREAKING, replace(action, tool_calls=mutated), f"call {i}{where}")

    for i, call in enumerate(calls):
        arguments, schema = call.arguments, schemas.get(call.name, {})
        required = schema.get("required") if isinstance(schema.get("required"), list) else []
        for key, value in arguments.items():
            at = f", argument {key}"
            known = _properties(schema).get(key, {})
            for kind, other in _other_values(value, known):
                yield put(kind, i, at, arguments={**arguments, key: other})
            if key in (required or ()):
                left = {k: v for k, v in arguments.items() if k != key}
                yield put("required_dropped", i, at, arguments=left)
        for one, two in _swaps(arguments):
            swapped = {**arguments, one: arguments[two], two: arguments[one]}
            yield put("values_swapped", i, f", arguments {one} and {two}", arguments=swapped)
        yield put("extra_argument", i, arguments={**arguments, "pivotrl_extra": "x"})
        if arguments:
            yield put("emptied", i, arguments={})
        other_tool = next((name for name in sorted(schemas) if name != call.name), f"{call.name}_2")
        yield put("renamed_tool", i, name=other_tool)
        yield Mutation("call_twice", BREAKING, replace(action, tool_calls=(*calls, call)), f"call {i}")
        if len(calls) > 1:
            yield Mutation(
                "call_left_out", BREAKING, replace(action, tool_calls=calls[:i] + calls[i + 1 :]), f"call {i}"
            )
    if calls:
        yield Mutation("spoken_instead", BREAKING, Action(text="I will do that for you now."))
        problem = replace(action, problems=("the last call is not closed",))
        yield Mutation("malformed", BREAKING, problem)
    else:
        yield Mutation("other_text", BREAKING, Action(text="Purple elephants rarely file their taxes on a Tuesday."))
        for value, changed in _changed_values(action.text):
            yield Mutation(
                "told_value_changed", BREAKING, replace(action, text=changed), f"value {value}", certain=True
            )
        tool = min(schemas, default="")
        if tool:
            yield Mutation("called_instead", BREAKING, Action(tool_calls=(ToolCall(tool, {}),)))


def _changed_values(text: str) -> Iterator[tuple[str, str]]:
    """The text with another last digit in one number or id that it tells, for each of the first of them."""
    marks = {m.start(1) for m in _LIST_MARK.finditer(text)}
    runs = [m for m in _DIGITS.finditer(text) if m.start() not in marks]
    for value in list(dict.fromkeys(m[0] for m in runs))[:_MOST_VALUES]:
        changed, other = text, value[:-1] + str((int(value[-1]) + 1) % 10)
        for m in runs:
            if m[0] == value:  # of the same length, so that places stay
                changed = changed[: m.start()] + other + changed[m.end() :]
        yield value, changed


def _other_values(value: Any, schema: JsonDict) -> Iterator[tuple[str, Any]]:
    """(kind, value) of values that mean something else, or have the wrong type."""
    if type(value) is bool:
        yield "value_changed", not value
        yield "wrong_type", int(value)
    elif type(value) is int:
        yield "value_changed", value + 1
        yield "wrong_type", str(value)
        if value in (0, 1):
            yield "wrong_type", bool(value)
    elif type(value) is float:
        yield "value_changed", value * 2 + 1
        yield "wrong_type", str(value)
    elif isinstance(value, str):
        options = schema.get("enum")
        others = [o for o in options if o != value] if isinstance(options, list) else []
        yield "value_changed", others[0] if others else _other_text(value)
        if value:
            yield "value_emptied", ""
    elif isinstance(value, list) and value:
        yield "value_changed", value[:-1]
        yield "value_changed", [*value, value[-1]]
        for kind, other in _other_values(value[-1], {}):
            yield kind, [*value[:-1], other]
    elif isinstance(value, dict) and value:
        key = next(iter(value))
        yield "value_changed", {k: v for k, v in value.items() if k != key}
        for kind, other in _other_values(value[key], _properties(schema).get(key, {})):
            yield kind, {**value, key: other}
    elif value is None:
        yield "value_changed", "something"


def _other_text(value: str) -> str:
    """An identifier with its last letter or digit replaced; other texts by an unrelated one."""
    if value.split() == [value] and any(c.isalnum() for c in value):
        i = max(k for k, c in enumerate(value) if c.isalnum())
        return value[:i] + ("7" if value[i] != "7" else "8") + value[i + 1 :]
    return "purple elephants on a tuesday"


def _swaps(arguments: JsonDict) -> Iterator[tuple[str, str]]:
    """Neighbouring arguments of one type with different values."""
    keys = list(arguments)
    for one, two in pairwise(keys):
        a, b = arguments[one], arguments[two]
        if type(a) is type(b) and a is not None and json.dumps(a) != json.dumps(b):
            yield one, two


# --- what depends on the tool


def probes(turn: Turn) -> Iterator[Mutation]:
    """One change of one value each: letters of the other case, blank space around, a list in reverse."""
    action = turn.demonstration
    for i, call in enumerate(action.tool_calls):
        for key, value in call.arguments.items():
            for kind, other in _variants(value):
                if json.dumps(other) == json.dumps(value):
                    continue
                calls = list(action.tool_calls)
                calls[i] = ToolCall(call.name, {**call.arguments, key: other})
                yield Mutation(kind, PROBE, replace(action, tool_calls=tuple(calls)), f"call {i}, argument {key}")

    reversed_lists = tuple(
        ToolCall(c.name, {k: v[::-1] if isinstance(v, list) else v for k, v in c.arguments.items()})
        for c in action.tool_calls
    )
    if reversed_lists != action.tool_calls:
        yield Mutation("all_lists_reversed", PROBE, replace(action, tool_calls=reversed_lists))


def _variants(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, str):
        yield "other_case", value.swapcase()
        yield "white_space", f" {value} "
        yield "other_words", f"In other words: {value}"
    elif isinstance(value, list):
        yield "list_reversed", value[::-1]


# --- what a policy would try


def _exploits(turn: Turn) -> Iterator[Mutation]:
    action, schemas = turn.demonstration, tool_schemas(turn)
    calls = action.tool_calls

    def exploit(kind: str, tried: Action) -> Mutation:
        return Mutation(kind, EXPLOIT, tried)

    yield exploit("empty", Action())
    yield exploit("thinking_only", Action(thinking=canonical_action(action) or "x"))
    prompt = next((str(m.get("content") or "") for m in reversed(turn.messages) if m.get("role") == "user"), "")
    yield exploit("copy_of_prompt", Action(text=prompt))
    yield exploit("agreeable_text", Action(text="Sure! I'm happy to help with that. Is there anything else?"))
    spam = tuple(ToolCall(name, {}) for name in sorted(schemas))
    if calls:
        yield exploit("spam_of_copies", replace(action, tool_calls=calls * 10))
        if any(call.arguments for call in calls):
            yield exploit("right_name_no_arguments", Action(tool_calls=tuple(ToolCall(c.name, {}) for c in calls)))
        if spam:
            yield exploit("demonstration_and_spam", replace(action, tool_calls=(*calls, *spam)))
        halved = tuple(ToolCall(c.name, {k: _prefix(v) for k, v in c.arguments.items()}) for c in calls)
        yield exploit("common_prefix", replace(action, tool_calls=halved))
        yield exploit("call_as_text", Action(text=canonical_action(action)))
    else:
        yield exploit("common_prefix", Action(text=action.text[: len(action.text) // 2]))
        told = f"{action.text} Your reference is {_INVENTED}."
        if _INVENTED not in action.text:
            yield replace(exploit("invented_value", replace(action, text=told)), certain=True)
    if spam:
        yield exploit("spam_of_calls", Action(tool_calls=spam))


def _prefix(value: Any) -> Any:
    if isinstance(value, str):
        return value[: len(value) // 2]
    return value[: (len(value) + 1) // 2] if isinstance(value, list) else value
