"""Reading the options of a verifier or an environment: unknown keys and wrong values are named, with a suggestion."""

from __future__ import annotations

from typing import Any

from pivotrl.errors import UserError
from pivotrl.strict import suggestion


def read_options(verifier: str, options: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`read_settings` of a verifier."""
    return read_settings(f"verifier {verifier}", options, defaults)


def read_settings(where: str, options: dict[str, Any], defaults: dict[str, Any]) -> dict[str, Any]:
    """`defaults` overlaid with `options`; a key that is not in `defaults`, or a value of another kind, is refused.

    A default of None takes any value; an int stands where a float is expected, a bool never stands for a number.
    """
    for key, value in options.items():
        if key not in defaults:
            hint = suggestion(str(key), list(defaults))
            known = ", ".join(sorted(defaults)) or "none"
            raise UserError(f"{where}: unknown option {key!r}.{hint} Known options: {known}.")
        wanted = defaults[key]
        if wanted is None:
            continue
        kinds = (
            (int, float) if isinstance(wanted, float) else (list, tuple) if isinstance(wanted, list) else type(wanted)
        )
        if not isinstance(value, kinds) or (isinstance(value, bool) and not isinstance(wanted, bool)):
            raise UserError(
                f"{where}: option {key!r} is {value!r}; it must be of type {type(wanted).__name__}, "
                f"like its default {wanted!r}."
            )
    return {**defaults, **options}


def one_of(verifier: str, key: str, value: Any, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UserError(f"verifier {verifier}: option {key!r} is {value!r}; it must be one of {', '.join(allowed)}.")


def within(verifier: str, key: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high:  # NaN fails too
        raise UserError(f"verifier {verifier}: option {key!r} is {value!r}; it must be from {low:g} to {high:g}.")
