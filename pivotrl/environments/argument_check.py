"""Check of a tool call's arguments against the part of JSON Schema that tools here use. Never coerces: 1 is not "1"."""

from __future__ import annotations

from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {"string": str, "integer": int, "number": (int, float), "boolean": bool}


def check_value(value: Any, schema: dict[str, Any], where: str) -> str | None:
    """First thing wrong with `value`, in words, or None. `where` names the place for the message."""
    kind = schema["type"]
    if kind == "object":
        return _check_object(value, schema, where)
    if kind == "array":
        if not isinstance(value, list):
            return f"{where} must be an array"
        for item in value:
            if problem := check_value(item, schema["items"], f"{where} item"):
                return problem
        return None
    # bool is an int to Python, not to JSON Schema.
    if not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean"):
        return f"{where} must be a {kind}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{where} must be one of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, str) and not value.strip():
        return f"{where} is empty"
    return None


def _check_object(value: Any, schema: dict[str, Any], where: str) -> str | None:
    if not isinstance(value, dict):
        return f"{where} must be an object"
    properties = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in value:
            return f"missing argument {name}"
    for name, item in value.items():
        if name not in properties:
            return f"unknown argument {str(name)[:40]}"
        if problem := check_value(item, properties[name], name):
            return problem
    return None
