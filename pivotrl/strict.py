"""Strict reading of plain mappings into the dataclasses of `pivotrl.config`. Pure; knows nothing of Hydra.

Every problem is collected, so that a user mends them in one go: unknown keys with the nearest known one, wrong types
with the path of the key.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints

MISSING_VALUE = "???"  # OmegaConf's mark for "the user must give this"


@dataclass(frozen=True)
class Problem:
    """One fault of a configuration; `kind` is "unknown", "type" or "missing"."""

    kind: str
    key: str  # dotted
    text: str


@cache
def _hints(schema: type) -> dict[str, Any]:
    return get_type_hints(schema)


def schema_keys(schema: type, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a schema, sections included, in order of declaration."""
    for name, hint in _hints(schema).items():
        key = f"{prefix}{name}"
        yield key
        if is_dataclass(hint):
            yield from schema_keys(hint, key + ".")  # type: ignore[arg-type]


def is_known(schema: type, key: str) -> bool:
    """Whether `key` names a section, a value, or something inside a free-form mapping of `schema`."""
    here: Any = schema
    for part in key.split("."):
        if get_origin(here) is dict:
            return True
        if not is_dataclass(here) or part not in _hints(here):  # type: ignore[arg-type]
            return False
        here = _hints(here)[part]  # type: ignore[arg-type]
    return True


def nearest(schema: type, key: str) -> str | None:
    """The known key that a misspelt one most likely means, or None."""
    known = list(schema_keys(schema))
    parent, _, leaf = key.rpartition(".")
    siblings = [k for k in known if k.rpartition(".")[0] == parent]
    if parent and (found := difflib.get_close_matches(key, siblings, 1, 0.75)):
        return found[0]
    # The right name in another (or a misspelt) section: `grpo.clip_hgh`, `clip_high`.
    by_leaf: dict[str, list[str]] = {}
    for k in known:
        by_leaf.setdefault(k.rpartition(".")[2], []).append(k)
    if names := difflib.get_close_matches(leaf, by_leaf, 1, 0.75):
        return max(by_leaf[names[0]], key=lambda k: difflib.SequenceMatcher(None, k, key).ratio())
    found = difflib.get_close_matches(key, known, 1, 0.6)
    return found[0] if found else None


def suggestion(choice: str, choices: list[str]) -> str:
    """`" Did you mean 'x'?"`, or an empty string."""
    found = difflib.get_close_matches(choice, choices, 1, 0.5)
    return f" Did you mean '{found[0]}'?" if found else ""


def unknown_key(schema: type, key: str, where: str = "") -> Problem:
    near = nearest(schema, key)
    hint = f"did you mean '{near}'?" if near else "see `pivotrl show-config` for all keys"
    return Problem("unknown", key, f"unknown key '{key}'{where}: {hint}")


def build(schema: type, values: Mapping[str, Any], problems: list[Problem], prefix: str = "") -> Any:
    """An instance of dataclass `schema`; faults are appended to `problems` (the instance is then of no use)."""
    hints = _hints(schema)
    arguments: dict[str, Any] = {}
    for name in values:
        if name not in hints:
            problems.append(unknown_key(_root(schema, prefix), f"{prefix}{name}"))
    for spec in fields(schema):
        if spec.name in values:
            value = _convert(hints[spec.name], values[spec.name], f"{prefix}{spec.name}", problems)
            arguments[spec.name] = value
        elif spec.default is MISSING and spec.default_factory is MISSING:
            problems.append(Problem("missing", f"{prefix}{spec.name}", f"'{prefix}{spec.name}' has no value"))
            arguments[spec.name] = None
    return schema(**arguments)


def _root(schema: type, prefix: str) -> type:
    from pivotrl.config import Config

    return Config if prefix else schema


def _name(hint: Any) -> str:
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join("null" if a is type(None) else _name(a) for a in get_args(hint))
    if get_origin(hint) is list:
        return f"list of {_name(get_args(hint)[0])}"
    if get_origin(hint) is dict or is_dataclass(hint):
        return "mapping"
    return {int: "integer", float: "number", bool: "true or false", str: "text"}.get(hint, str(hint))


def _missing(key: str) -> Problem:
    return Problem("missing", key, f"'{key}' has no value; give one: {key}=...")


def _unset(values: Mapping[Any, Any], key: str) -> Iterator[str]:
    """Keys of a free mapping, to any depth, for which the user must give a value."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _unset(value, f"{key}.{name}")
        elif isinstance(value, str) and value == MISSING_VALUE:
            yield f"{key}.{name}"


def _convert(hint: Any, value: Any, key: str, problems: list[Problem]) -> Any:
    """`value` as `hint`, or None with a problem noted. No cast that loses anything: 1 is a float, 1.5 is no integer."""
    if value == MISSING_VALUE and isinstance(value, str):
        problems.append(_missing(key))
        return None
    if get_origin(hint) in (Union, types.UnionType):
        if value is None:
            return None
        inner = [a for a in get_args(hint) if a is not type(None)]
        hint = inner[0] if len(inner) == 1 else hint
    if is_dataclass(hint) and isinstance(value, Mapping):
        return build(hint, value, problems, key + ".")  # type: ignore[arg-type]
    origin = get_origin(hint)
    if origin is dict and isinstance(value, Mapping):
        problems += map(_missing, _unset(value, key))
        return dict(value)
    if origin is list and isinstance(value, list):
        return [_convert(get_args(hint)[0], item, f"{key}[{i}]", problems) for i, item in enumerate(value)]
    if hint is bool and isinstance(value, bool):
        return value
    if not isinstance(value, bool):
        if hint is int and isinstance(value, int):
            return value
        if hint is float and isinstance(value, int | float):
            if math.isfinite(value):
                return float(value)
            problems.append(Problem("type", key, f"'{key}': expected a finite number, got {value}"))
            return None
        if hint is str and isinstance(value, str | int | float):
            return str(value)  # a run named 42
    problems.append(Problem("type", key, f"'{key}': expected {_name(hint)}, got {_shown(value)}"))
    return None


def _shown(value: Any) -> str:
    kind = {str: "text", bool: "true or false", type(None): "null", int: "integer", float: "number"}
    named = kind.get(type(value), "mapping" if isinstance(value, Mapping) else "list")
    return "null" if value is None else f"{named} {value!r}"
