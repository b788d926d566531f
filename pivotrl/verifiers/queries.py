"""When two search queries ask for the same, and when two short answers say the same."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation

_OPERATOR_NAMES = (
    "site filetype ext intitle allintitle inurl allinurl intext allintext inanchor related cache before after author "
    "source lang language location loc"
)
OPERATORS = frozenset(_OPERATOR_NAMES.split())
_DROPPED = frozenset(("a", "an", "the"))
_TOKEN = re.compile(r'[-+]?(?:\w+:)?"[^"]*"|\S+')
_EDGES = ".,;:!?()[]{}'\"`…"
_JOINED = re.compile(r"\bOR\b|\|")
_RANGE = re.compile(r"[$€£]?\d+\.\.[$€£]?\d+")


def fold(text: str, *, case: bool = False) -> str:
    """Case (unless it is to be kept), width, quotation marks, dashes and white space in one form."""
    text = unicodedata.normalize("NFKC", text)
    text = text if case else text.casefold()
    text = text.translate(str.maketrans("“”„«»‘’‚‐‑‒–—−", '"""""\'\'\'------'))
    return " ".join(text.split())


@dataclass(frozen=True)
class Query:
    """A parsed query. `terms` in order; everything else constrains the result and must be equal."""

    terms: tuple[str, ...]
    phrases: Counter[str] = field(default_factory=Counter)
    constraints: Counter[str] = field(default_factory=Counter)  # "site:x", "-term", "1..5", and groups joined by "or"


def parse_query(text: str) -> Query:
    """Terms, "quoted phrases" and operators of a query in the notation that search engines share."""
    if ("(" in text or ")" in text) and _JOINED.search(text):  # which terms an OR joins depends on the parentheses
        return Query((), Counter(), Counter([fold(text)]))
    terms: list[str] = []
    phrases: Counter[str] = Counter()
    constraints: Counter[str] = Counter()
    alternatives: list[str] = []  # of the group being read
    joined = False  # an OR was just read
    for token in _TOKEN.findall(_unquoted(unicodedata.normalize("NFKC", text))):
        if token in ("OR", "|"):  # only in capitals; "or" is a word
            joined = True
            continue
        if token == "AND" or (token != "*" and not any(c.isalnum() for c in token)):  # a dash between words
            continue
        kind, value = _classify(fold(token))
        if not value:
            continue
        if joined or not alternatives:
            alternatives.append(f"{kind}{value}")
        else:
            _file(alternatives, terms, phrases, constraints)
            alternatives = [f"{kind}{value}"]
        joined = False
    _file(alternatives, terms, phrases, constraints)
    kept = tuple(term for term in terms if term not in _DROPPED)
    if not (terms or phrases or constraints):  # of signs alone, as emoji
        return Query(tuple(fold(text).split()))
    return Query(kept or tuple(terms), phrases, constraints)


def _unquoted(text: str) -> str:
    """Typographic quotation marks plain; a lone mark is no phrase."""
    text = text.translate(str.maketrans("“”„«»", '"""""'))
    return text if text.count('"') % 2 == 0 else text.replace('"', " ")


def _classify(token: str) -> tuple[str, str]:
    """(kind, value) with kind "" for a term, '"' for a phrase, and the operator itself else."""
    sign = token[0] if token[0] in "-+" and len(token) > 1 else ""
    body = token[1:] if sign else token
    name, colon, value = body.partition(":")
    prefix = "-" if sign == "-" else ""
    if colon and name in OPERATORS and value:
        name = "filetype" if name == "ext" else name
        return f"{prefix}{name}:", value.strip('"').strip()
    if _RANGE.fullmatch(body):
        return f"{prefix}range:", body
    if body.startswith('"') and body.endswith('"') and len(body) > 1:
        words = " ".join(word.strip(_EDGES) for word in body.strip('"').split())
        return f'{prefix}"', words
    return prefix, _bare(body)


def _bare(word: str) -> str:
    """`word` without the punctuation around it; the dot of .net and .5 and the marks of 5' and 5" belong to it."""
    start = len(word) - len(word.lstrip(_EDGES))
    end = len(word.rstrip(_EDGES))
    if start and start < end and word[start - 1] == "." != word[max(start - 2, 0) : start - 1]:
        start -= 1
    if 0 < end < len(word) and word[end] in "'\"" and word[end - 1].isdigit() and word[end] not in word[:start]:
        end += 1
    return word[start:end]


def _file(alternatives: list[str], terms: list[str], phrases: Counter[str], constraints: Counter[str]) -> None:
    if len(alternatives) > 1:
        constraints[" or ".join(sorted(set(alternatives)))] += 1
    elif alternatives:
        item = alternatives[0]
        if item.startswith('"'):
            phrases[item[1:]] += 1
        elif item.startswith("-") or re.match(r"(?:range|" + "|".join(OPERATORS) + "):", item):
            constraints[item] += 1
        else:
            terms.append(item)


def numbers(text: str) -> Counter[str]:
    """The terms that hold a digit: years, amounts, versions. Similar texts with other numbers ask something else."""
    return Counter(word.strip(_EDGES) for word in fold(text).split() if any(c.isdigit() for c in word))


def query_similarity(one: str, two: str) -> float:
    """Dice of the term multisets, 2|A n B| / (|A| + |B|); 0 where phrases, operators or numbers differ."""
    a, b = parse_query(one), parse_query(two)
    if a.phrases != b.phrases or a.constraints != b.constraints:
        return 0.0
    if [t for t in sorted(a.terms) if _digit(t)] != [t for t in sorted(b.terms) if _digit(t)]:
        return 0.0
    if not a.terms and not b.terms:
        return 1.0
    return 2 * (Counter(a.terms) & Counter(b.terms)).total() / (len(a.terms) + len(b.terms))


def same_query(one: str, two: str, *, ordered: bool = False) -> bool:
    """The same terms (as a multiset, or in order), phrases and operators."""
    a, b = parse_query(one), parse_query(two)
    terms = a.terms == b.terms if ordered else Counter(a.terms) == Counter(b.terms)
    return terms and a.phrases == b.phrases and a.constraints == b.constraints


def text_similarity(one: str, two: str) -> float:
    """Dice of the word multisets of two free texts; 0 where their numbers differ."""
    if numbers(one) != numbers(two):
        return 0.0
    words = [Counter(w for w in (t.strip(_EDGES) for t in fold(text).split()) if w) for text in (one, two)]
    total = words[0].total() + words[1].total()
    return 2 * (words[0] & words[1]).total() / total if total else float(fold(one) == fold(two))


def _digit(term: str) -> bool:
    return any(c.isdigit() for c in term)


# --- answers

# Bounded runs: a text of a million blank lines is read once.
_MARKED = re.compile(
    r"\\boxed\{([^{}]*)\}|(?:^|\n)\W{0,20}(?:final )?answer\W{0,20}?:(?:(?![-+]?[$€£]?\.?\d)\W){0,40}([^\n]+)",
    re.IGNORECASE,
)
_TAGS = re.compile(r"</?answer>", re.IGNORECASE)
_NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen twenty"
)
_WORDS = {word: str(number) for number, word in enumerate(_NUMBER_WORDS.split())}
_SCALES = {"thousand": 3, "million": 6, "mn": 6, "billion": 9, "bn": 9, "trillion": 12}
_MONEY_SCALES = {"k": 3, "m": 6, "b": 9}  # "5 m" alone is a length
_SYMBOL = 3  # letters: a longer unit is a word, whose case says nothing
_QUANTITY = re.compile(r"([-+]?)\s*([$€£]?)\s*(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d*\.?\d+)\s*([a-z%°/]*(?: [a-z/]+)?)")


def short_answer(text: str, *, case: bool = False) -> str:
    """The answer in a text, folded: the marked part (`<answer>`, `\\boxed{}`, `Answer: ...`) if it has one."""
    body = fold(_marked(text), case=case).replace("**", "")
    words = _bare(body.strip("* ")).split()
    return " ".join(words[1:] if words[:1] and words[0] in _DROPPED and len(words) > 1 else words)


def _marked(text: str) -> str:
    """The last marked part of a text; all of it where none is marked."""
    found = [(m.start(), m[1] if m[1] is not None else m[2]) for m in _MARKED.finditer(text)]
    opened: re.Match[str] | None = None
    for tag in _TAGS.finditer(text):
        if tag[0][1] != "/":
            opened = opened or tag
        elif opened:
            found.append((opened.start(), text[opened.end() : tag.start()]))
            opened = None
    return max(found)[1] if found else text


def quantity(answer: str) -> tuple[Decimal, str] | None:
    """(value, unit) of an answer that is one number and perhaps a unit: "$115,877 million", "51.00 %", "four"."""
    match = _QUANTITY.fullmatch(_WORDS.get(answer, answer))
    if not match:
        return None
    sign, currency, digits, rest = match.groups()
    words = rest.replace("percent", "%").split()
    power = ({**_SCALES, **_MONEY_SCALES} if currency else _SCALES).get(words[0], 0) if words else 0
    unit = " ".join(words[1:] if power else words)
    try:
        value = Decimal(sign + digits.replace(",", "")).scaleb(power)
    except InvalidOperation:
        return None
    return value, {"$": "usd", "€": "eur", "£": "gbp"}.get(currency, "") + (" " + unit if currency and unit else unit)


def _unit_letters(text: str, answer: str) -> str:
    """The letters of the unit of a quantity whose case says what it is: mW and MW, Mb and MB."""
    if not (found := quantity(answer)) or not found[1] or found[1].startswith(("usd", "eur", "gbp")):
        return ""
    unit = re.sub(r".*[^a-z]", "", short_answer(text, case=True), flags=re.DOTALL | re.IGNORECASE)
    if len(unit) > _SYMBOL or unit.casefold() in ("mph", "min"):
        return ""
    return "".join(c for i, c in enumerate(unit) if c in "bB" or (i == 0 and c in "mM"))


def same_answer(one: str, two: str) -> bool | None:
    """True or False where normalisation settles it (equal texts, two quantities, yes against no); else None.

    Quantities of one unit within 1 % of each other are not settled (one may be rounded), nor are those of two units.
    """
    a, b = short_answer(one), short_answer(two)
    if fold(two) and ((a and a == b) or fold(one) == fold(two)):
        return True if _unit_letters(one, a) == _unit_letters(two, b) else None
    if not b:
        return False
    left, right = quantity(a), quantity(b)
    if left and right:
        (x, unit), (y, other) = left, right
        if unit != other:
            return None
        return True if x == y else None if abs(x - y) * 100 <= max(abs(x), abs(y)) else False
    polar = {"yes": True, "no": False, "true": True, "false": False}
    if a in polar and b in polar:
        return polar[a] == polar[b]
    return None
