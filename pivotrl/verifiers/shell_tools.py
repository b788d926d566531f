"""Commands of known tools in one form: (name, options, operands), however the options are spelt, bundled or placed.

Whatever the tables do not name (an unknown option, an option after an operand that a variable or glob may turn into an
option...) leaves that command as its exact words: a false negative, never a false positive.
"""

from __future__ import annotations

import re
from typing import Any

from pivotrl.verifiers.shell_tables import TOOLS, Tool

Word = str | tuple[Any, ...]
Command = tuple[Any, ...]

_SUBCOMMANDS = frozenset({"git", "pip", "pip3"})
_WRAPPERS = frozenset({"sudo", "time", "nohup", "xargs", "command", "exec"})
_MODULES = frozenset({"pytest", "pip"})


def normalise_command(words: tuple[Word, ...]) -> Command:
    """A simple command's words -> (name, options, operands) for a known tool, else ("words", word...). Total."""
    if not words or not isinstance(words[0], str):
        return ("words", *words)
    name, arguments = words[0], words[1:]
    if name in _WRAPPERS and arguments and isinstance(arguments[0], str) and not arguments[0].startswith("-"):
        inner = TOOLS.get(arguments[0])
        if name == "xargs" and ((inner and inner.default_operand) or "--" in arguments):
            return ("words", *words)  # xargs adds operands: none may be assumed, and `--` protects them
        return ("wrapped", name, normalise_command(arguments))
    key = name
    if name in _SUBCOMMANDS and arguments and isinstance(arguments[0], str):
        key, arguments = f"{name} {arguments[0]}", arguments[1:]
    known = TOOLS.get(key.replace("pip3 ", "pip "))
    parsed = _parse(known, _old_tar(arguments) if name == "tar" else arguments) if known else None
    if parsed is None or known is None:
        return ("words", *words)
    options, operands = parsed
    if name == "rm" and any(_is_root(word) for word in operands):
        return ("words", *words)  # never widened, not even to another spelling of itself
    return (key, _order(known, options), _operands(known, options, operands))


def _parse(known: Tool, arguments: tuple[Word, ...]) -> tuple[list[tuple[str, Any]], list[Word]] | None:
    """getopt: options as (name, value or None) in order, and operands; None where the table does not reach."""
    options: list[tuple[str, Any]] = []
    operands: list[Word] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        if word == "--":
            if not known.dashes or known.stop or any(_may_be_option(w) for w in rest):
                return None
            operands.extend(rest)
            break
        if not isinstance(word, str) or not word.startswith("-") or word == "-":
            if not isinstance(word, str) and _starts_like_option(word):
                return None
            operands.append(word)
            if known.stop:
                operands.extend(rest)
                break
            continue
        if any(_may_be_option(w) for w in operands):
            return None  # `ls $X -l`: X may end the options
        if not _option(known, word, rest, options):
            return None
        if options and options[-1][0] in known.final:
            operands.extend(rest)
            break
    if operands and any(name in known.positional for name, _ in options) and _sensitive(known, options, operands):
        return None
    return options, operands


def _option(known: Tool, word: str, rest: list[Word], options: list[tuple[str, Any]]) -> bool:
    """Read one option word; False if unknown or without its value."""
    if word.startswith("--"):
        name, joined, value = word[2:].partition("=")
        if len(name) < 2:
            return False
        if joined:
            if word[2:] in known.flags:
                options.append((known.flags[word[2:]], None))
                return True
            target = known.values.get(name) or known.attached.get(name)
            options.append((target or "", value))
            return target is not None
        if name in known.flags or name in known.attached:
            options.append((known.flags.get(name) or known.attached[name], None))
            return True
        if name in known.values and rest:
            options.append((known.values[name], rest.pop(0)))
            return True
        return False
    if known.number and re.fullmatch(r"-\d+", word):
        options.append((known.number, word[1:]))
        return True
    for i, letter in enumerate(word[1:], start=1):
        if letter in known.flags:
            options.append((known.flags[letter], None))
        elif letter in known.attached:
            options.append((known.attached[letter], word[i + 1 :] or None))
            return True
        elif letter in known.values:
            if word[i + 1 :]:
                options.append((known.values[letter], word[i + 1 :]))
            elif rest:
                options.append((known.values[letter], rest.pop(0)))
            else:
                return False
            return True
        else:
            return False
    return True


def _order(known: Tool, options: list[tuple[str, Any]]) -> tuple[Any, ...]:
    """Options sorted by name; the order inside a group and among repetitions is kept."""
    if known.defaults:
        grouped = {name for name, _ in options}
        if not any(grouped & group for group in known.groups if set(known.defaults) & group):
            options = [*options, *known.defaults.items()]
    rank = {name: min(group) for group in reversed(known.groups) for name in group}
    kept: list[tuple[str, Any]] = []
    for option in options:
        if option not in kept or option[1] is not None or option[0] in known.counted:
            kept.append(option)
    return tuple(sorted(kept, key=lambda option: rank.get(option[0], option[0])))


def _operands(known: Tool, options: list[tuple[str, Any]], operands: list[Word]) -> tuple[Word, ...]:
    if options and options[-1][0] in known.final:
        if options[-1][0] == "m" and options[-1][1] in _MODULES:
            return (normalise_command((options[-1][1], *operands)),)
        return tuple(operands)
    if not operands and known.default_operand:
        return (known.default_operand,)
    first = 0
    if known.paths == "rest" and not any(name in known.pattern_options for name, _ in options):
        first = 1
    last = {"none": 0, "first": 1}.get(known.paths, len(operands))
    found: list[Word] = []
    for i, word in enumerate(operands):
        if isinstance(word, str) and first <= i < last:
            word = normalise_path(word)
            if known.directories:
                word = word.rstrip("/") or word
        found.append(word)
    return tuple(found)


def normalise_path(path: str) -> str:
    """`./x` = `x`, `a//b` = `a/./b` = `a/b`. `..` and a trailing slash stay: with symbolic links they matter."""
    short = re.sub(r"/(?:\.?/)+", "/", path)
    while short.startswith("./") and len(short) > 2:
        short = short[2:]
    if short in ("", "/", "-") or (short == "./" and path != "./"):
        return path
    return short


def _old_tar(arguments: tuple[Word, ...]) -> tuple[Word, ...]:
    """`tar xzf a.tgz` -> `tar -xz -f a.tgz`."""
    first = arguments[0] if arguments else ""
    if not isinstance(first, str) or not re.fullmatch(r"[a-zA-Z]+", first) or first.count("f") > 1 or "C" in first:
        return arguments
    letters = first.replace("f", "")
    if "f" not in first:
        return (f"-{letters}", *arguments[1:])
    return (*((f"-{letters}",) if letters else ()), "-f", *arguments[1:])


def _sensitive(known: Tool, options: list[tuple[str, Any]], operands: list[Word]) -> bool:
    """Whether the place of a positional option can matter: with several URLs, or with members of an archive."""
    return len(operands) > 1 if known is TOOLS["curl"] else True


def _may_be_option(word: Word) -> bool:
    """An operand whose text is not known and may begin with a dash."""
    return not isinstance(word, str) and word[0][0] != "s"


def _starts_like_option(word: tuple[Any, ...]) -> bool:
    return word[0][0] == "s" and word[0][1].startswith("-")


def _is_root(word: Word) -> bool:
    text = word if isinstance(word, str) else "".join(part[1] for part in word if part[0] in ("s", "g"))
    return not text.strip("/.*")
