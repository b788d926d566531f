"""`<think>...</think>` at the head of a completion, for the action grammars whose calls are no JSON in tags."""

from __future__ import annotations

OPEN, CLOSE = "<think>", "</think>"


def split_thinking_text(text: str, call: int = -1, call_end: int = -1) -> tuple[str, str, list[str]]:
    """(thinking, what follows it, problems). Total.

    Thinking may lack its opening tag, which some templates put in the prompt. `call`, `call_end`: where the first call
    begins and ends (-1: none), so that a tag quoted in one of its values is data.
    """
    stripped = text.lstrip()
    if stripped.startswith(OPEN):
        inner, found, body = stripped[len(OPEN) :].partition(CLOSE)
        return (_trim(inner), _body(body), []) if found else (inner.removeprefix("\n"), "", ["unclosed_thinking"])
    close, opening = text.find(CLOSE), text.find(OPEN)
    if close >= 0 and not 0 <= opening < close and not 0 <= call < close < call_end:
        return _trim(text[:close]), _body(text[close + len(CLOSE) :]), []
    if opening < 0 or 0 <= call < opening:
        return "", text, []
    inner, found, rest = text[opening + len(OPEN) :].partition(CLOSE)
    return inner, text[:opening] + rest, ["misplaced_thinking" if found else "unclosed_thinking"]


def _trim(inner: str) -> str:
    return inner.removeprefix("\n").removesuffix("\n")


def _body(text: str) -> str:
    return text.removeprefix("\n").removeprefix("\n")


def with_thinking(thinking: str, body: str) -> str:
    """The text that `split_thinking_text` takes apart."""
    return f"{OPEN}\n{thinking}\n{CLOSE}\n\n{body}" if thinking else body
