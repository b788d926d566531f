"""Type-aware comparison of JSON values against a JSON Schema: what "the same arguments" means.

Rules (field report G4): key order does not matter, list order does unless the field is named in `unordered`; 1 equals
1.0 only where the schema says "number"; booleans are not numbers; a default written out equals the field left out; a
field with `enum` or `const` is compared exactly whatever its string rule, one whose `format` is a date or time by what
it means.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pivotrl.trajectories.schema import JsonDict
from pivotrl.verifiers.strings import StringRule, dated, exact

Schemas = tuple[JsonDict, ...]  # the alternatives (anyOf, oneOf, allOf, $ref resolved) that describe one value


@dataclass(frozen=True)
class Difference:
    """Where two values differ: `reason` is a machine name, `path` the field ("passengers.dob")."""

    reason: str
    path: str


@dataclass(frozen=True)
class Rules:
    """`strings` gives the rule of a field path; `unordered` says whether list order is ignored there."""

    strings: Callable[[str], StringRule]
    unordered: Callable[[str], bool]


def json_equal(a: Any, b: Any) -> bool:
    """Equality of JSON values with their types: 1, 1.0, true and "1" are four values. Key order is irrelevant."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(json_equal(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(json_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def resolve(schema: Any, root: JsonDict) -> Schemas:
    """The alternative object schemas behind `schema`; a reference that leads nowhere or in a circle gives none."""
    found: list[JsonDict] = []
    seen: set[int] = set()
    queue = deque([schema])
    while queue and len(seen) < 256:
        node = queue.popleft()
        if not isinstance(node, dict) or id(node) in seen:
            continue
        seen.add(id(node))
        found.append(node)
        for key in ("anyOf", "oneOf", "allOf"):
            if isinstance(node.get(key), list):
                queue.extend(node[key])
        if isinstance(node.get("$ref"), str):
            queue.append(_follow(node["$ref"], root))
    return tuple(found)


def _follow(reference: str, root: JsonDict) -> Any:
    node: Any = root
    for part in reference.removeprefix("#").split("/")[1:]:
        node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, dict) else None
    return node


def _types(schemas: Schemas) -> set[str]:
    names: set[str] = set()
    for schema in schemas:
        kind = schema.get("type")
        names.update(
            [kind]
            if isinstance(kind, str)
            else [k for k in kind if isinstance(k, str)]
            if isinstance(kind, list)
            else []
        )
    return names


def _property(schemas: Schemas, key: str, root: JsonDict) -> Schemas | None:
    """Schemas of a field, or None where no alternative declares it."""
    declared = [
        s["properties"][key] for s in schemas if isinstance(s.get("properties"), dict) and key in s["properties"]
    ]
    return tuple(found for schema in declared for found in resolve(schema, root)) if declared else None


def _additional(schemas: Schemas, root: JsonDict) -> Schemas:
    """What `additionalProperties` says of fields that are not declared by name."""
    return tuple(found for schema in schemas for found in resolve(schema.get("additionalProperties"), root))


def _one_default(field: Schemas) -> list[Any]:
    """The default of a field; none where alternatives name different ones, for then it is not known which is meant."""
    defaults = [schema["default"] for schema in field if "default" in schema]
    return defaults[:1] if all(json_equal(defaults[0], other) for other in defaults) else []


def difference(
    expected: Any, actual: Any, schemas: Schemas, root: JsonDict, rules: Rules, path: str
) -> Difference | None:
    """The first difference of `actual` from `expected`, or None. Total; `path` begins with the tool's name."""
    if isinstance(expected, dict) and isinstance(actual, dict):
        return _objects(expected, actual, schemas, root, rules, path)
    if isinstance(expected, list) and isinstance(actual, list):
        return _lists(expected, actual, schemas, root, rules, path)
    if isinstance(expected, str) and isinstance(actual, str):
        if any("enum" in schema or "const" in schema for schema in schemas):
            same = exact(expected, actual)
        elif any(schema.get("format") in ("date", "time", "date-time") for schema in schemas):
            same = dated(expected, actual)
        else:
            same = rules.strings(path)(expected, actual)
        return None if same else Difference("argument_differs", path)
    if _is_number(expected) and _is_number(actual):
        mixed = type(expected) is not type(actual)
        same = expected == actual and (not mixed or "number" in _types(schemas))
        return None if same else Difference("argument_differs", path)
    if type(expected) is not type(actual):
        return Difference("argument_type_differs", path)
    return None if expected == actual else Difference("argument_differs", path)  # booleans and null


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _objects(
    expected: JsonDict, actual: JsonDict, schemas: Schemas, root: JsonDict, rules: Rules, path: str
) -> Difference | None:
    required = {
        key for s in schemas if isinstance(s.get("required"), list) for key in s["required"] if isinstance(key, str)
    }
    for key in [*expected, *(key for key in actual if key not in expected)]:
        field = _property(schemas, key, root)
        where = f"{path}.{key}"
        defaults = _one_default(field or ())
        if key in expected and key in actual:
            described = _additional(schemas, root) if field is None else field
            found = difference(expected[key], actual[key], described, root, rules, where)
            if found is not None:
                return found
        elif key in expected:
            if not _is_default(expected[key], defaults, field, root, rules, where):
                return Difference("missing_required" if key in required else "missing_argument", where)
        elif field is None:
            return Difference("unknown_argument", where)
        elif not _is_default(actual[key], defaults, field, root, rules, where):
            return Difference("extra_argument", where)
    return None


def _is_default(
    value: Any, defaults: list[Any], field: Schemas | None, root: JsonDict, rules: Rules, path: str
) -> bool:
    return any(difference(default, value, field or (), root, rules, path) is None for default in defaults)


def _lists(
    expected: list[Any], actual: list[Any], schemas: Schemas, root: JsonDict, rules: Rules, path: str
) -> Difference | None:
    if len(expected) != len(actual):
        return Difference("list_length_differs", path)
    items = tuple(found for schema in schemas for found in resolve(schema.get("items"), root))
    if rules.unordered(path):
        same = perfect_match(expected, actual, lambda e, a: difference(e, a, items, root, rules, path) is None)
        return None if same else Difference("argument_differs", path)
    for e, a in zip(expected, actual, strict=True):
        found = difference(e, a, items, root, rules, path)
        if found is not None:
            return found
    return None


def perfect_match(left: Sequence[Any], right: Sequence[Any], same: Callable[[Any, Any], bool]) -> bool:
    """Whether a one-to-one pairing with `same(l, r)` exists (equivalence by similarity is not transitive, so greedy
    pairing could miss it). Augmenting paths, breadth first: O(n^3) at worst, calls `same` at most n^2 times."""
    if len(left) != len(right):
        return False
    edges = [[j for j, r in enumerate(right) if same(item, r)] for item in left]
    partner: dict[int, int] = {}  # right index -> left index
    for start in range(len(left)):
        came_from: dict[int, int] = {}  # right index -> left index it was reached from
        queue = deque([start])
        end: int | None = None
        while queue and end is None:
            i = queue.popleft()
            for j in edges[i]:
                if j in came_from:
                    continue
                came_from[j] = i
                if j not in partner:
                    end = j
                    break
                queue.append(partner[j])
        if end is None:
            return False
        while end is not None:  # flip the path back to `start`
            i = came_from[end]
            before = next((k for k, owner in partner.items() if owner == i), None)
            partner[end] = i
            end = before
    return True
