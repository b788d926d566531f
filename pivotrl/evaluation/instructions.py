"""Programmatic checks of written instructions, by the ids and arguments of IFEval (arXiv 2311.07911). Pure Python.

`follows(response, prompt, id, arguments)` is True, False, or None for an instruction that no check here covers (the
language of a response needs a language model): a prompt with such a one is left out and counted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

Arguments = Mapping[str, Any]
Check = Callable[[str, str, Arguments], bool]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+(?:['’-]\w+)*", text)


def _sentences(text: str) -> list[str]:
    return [part for part in re.split(r"(?<=[.!?])[\"')\]]*\s+|\n+", text.strip()) if re.search(r"\w", part)]


def _related(count: int, relation: str | None, bound: int) -> bool:
    """IFEval's relations: "at least" and "less than"."""
    return count < bound if relation == "less than" else count >= bound


def _occurrences(word: str, text: str) -> int:
    return len(re.findall(rf"(?<!\w){re.escape(word)}(?!\w)", text, re.IGNORECASE))


def _number_words(text: str, prompt: str, a: Arguments) -> bool:
    return _related(len(_words(text)), a.get("relation"), a["num_words"])


def _number_sentences(text: str, prompt: str, a: Arguments) -> bool:
    return _related(len(_sentences(text)), a.get("relation"), a["num_sentences"])


def _number_paragraphs(text: str, prompt: str, a: Arguments) -> bool:
    """Paragraphs are separated by the divider that the instruction asks for: ***."""
    parts = [part for part in re.split(r"\s?\*\*\*\s?", text) if part.strip()]
    return len(parts) == a["num_paragraphs"]


def _first_word(text: str, prompt: str, a: Arguments) -> bool:
    parts = [part for part in re.split(r"\n\n", text) if part.strip()]
    if len(parts) != a["num_paragraphs"] or not 1 <= a["nth_paragraph"] <= len(parts):
        return False
    words = _words(parts[a["nth_paragraph"] - 1])
    return bool(words) and words[0].lower() == str(a["first_word"]).lower()


def _highlights(text: str, prompt: str, a: Arguments) -> bool:
    spans = re.findall(r"(?<!\*)\*\*[^*\n]+\*\*(?!\*)|(?<!\*)\*[^*\n]+\*(?!\*)", text)
    return sum(bool(span.strip("* ")) for span in spans) >= a["num_highlights"]


def _bullets(text: str, prompt: str, a: Arguments) -> bool:
    return len(re.findall(r"^\s*(?:\*(?!\*)|-)\s+\S", text, re.MULTILINE)) == a["num_bullets"]


def _sections(text: str, prompt: str, a: Arguments) -> bool:
    marks = re.findall(rf"\s?{re.escape(str(a['section_spliter']))}\s?\d+\s?", text)
    return len(marks) >= a["num_sections"]


def _json(text: str, prompt: str, a: Arguments) -> bool:
    inner = re.fullmatch(r"\s*```(?:json|JSON|Json)?\s*\n?(.*?)\n?```\s*", text, re.DOTALL)
    try:
        json.loads(inner.group(1) if inner else text)
    except ValueError:
        return False
    return True


def _letter_frequency(text: str, prompt: str, a: Arguments) -> bool:
    return _related(text.lower().count(str(a["letter"]).lower()), a.get("let_relation"), a["let_frequency"])


def _capital_words(text: str, prompt: str, a: Arguments) -> bool:
    capitals = sum(word.isupper() for word in _words(text))
    return _related(capitals, a.get("capital_relation"), a["capital_frequency"])


def _repeat_prompt(text: str, prompt: str, a: Arguments) -> bool:
    return text.strip().lower().startswith(str(a["prompt_to_repeat"]).strip().lower())


def _two_responses(text: str, prompt: str, a: Arguments) -> bool:
    parts = [part.strip() for part in text.split("******")]
    parts = [part for i, part in enumerate(parts) if part or i not in (0, len(parts) - 1)]
    return len(parts) == 2 and all(parts) and parts[0] != parts[1]


def _postscript(text: str, prompt: str, a: Arguments) -> bool:
    letters = [re.escape(letter) for letter in str(a["postscript_marker"]).replace(".", "").replace(" ", "")]
    return re.search(r"\.?\s?".join(letters), text, re.IGNORECASE) is not None


def _constrained(text: str, prompt: str, a: Arguments) -> bool:
    return any(answer in text for answer in ("My answer is yes.", "My answer is no.", "My answer is maybe."))


CHECKS: dict[str, Check] = {
    "change_case:capital_word_frequency": _capital_words,
    "change_case:english_capital": lambda text, prompt, a: text.isupper(),
    "change_case:english_lowercase": lambda text, prompt, a: text.islower(),
    "combination:repeat_prompt": _repeat_prompt,
    "combination:two_responses": _two_responses,
    "detectable_content:number_placeholders": lambda text, prompt, a: (
        len(re.findall(r"\[[^\[\]]+\]", text)) >= a["num_placeholders"]
    ),
    "detectable_content:postscript": _postscript,
    "detectable_format:constrained_response": _constrained,
    "detectable_format:json_format": _json,
    "detectable_format:multiple_sections": _sections,
    "detectable_format:number_bullet_lists": _bullets,
    "detectable_format:number_highlighted_sections": _highlights,
    "detectable_format:title": lambda text, prompt, a: any(
        title.strip(" <>") for title in re.findall(r"<<[^\n]+>>", text)
    ),
    "keywords:existence": lambda text, prompt, a: all(_occurrences(str(k), text) for k in a["keywords"]),
    "keywords:forbidden_words": lambda text, prompt, a: (
        not any(_occurrences(str(k), text) for k in a["forbidden_words"])
    ),
    "keywords:frequency": lambda text, prompt, a: _related(
        _occurrences(str(a["keyword"]), text), a.get("relation"), a["frequency"]
    ),
    "keywords:letter_frequency": _letter_frequency,
    "length_constraints:nth_paragraph_first_word": _first_word,
    "length_constraints:number_paragraphs": _number_paragraphs,
    "length_constraints:number_sentences": _number_sentences,
    "length_constraints:number_words": _number_words,
    "punctuation:no_comma": lambda text, prompt, a: "," not in text,
    "startend:end_checker": lambda text, prompt, a: (
        text.strip().strip('"').lower().endswith(str(a["end_phrase"]).strip().lower())
    ),
    "startend:quotation": lambda text, prompt, a: len(text.strip()) > 1 and text.strip()[0] == text.strip()[-1] == '"',
}


def follows(response: str, prompt: str, instruction: str, arguments: Arguments) -> bool | None:
    """Whether the response keeps one instruction; None where there is no check. An empty response keeps none.

    Raises KeyError for arguments that the instruction needs and the row lacks.
    """
    check = CHECKS.get(instruction)
    if check is None:
        return None
    return bool(response.strip()) and check(response, prompt, arguments)
