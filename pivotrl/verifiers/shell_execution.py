"""Whether two commands do the same, by running both in the sandbox: files, output and exit code.

What the sandbox holds is not what the agent's machine held, so both run in two worlds: the files that the state shows;
and those with a made-up file for every other name that either command mentions, so that `rm a` and `rm b` are told
apart. A world counts only where the demonstrated command ends well and leaves or says something there.

Equal effects say nothing about what these worlds do not show (`head -5` and `head -50` of a short file, two downloads
without a network, errors that go to /dev/null). So every word that one command has and the other has not must matter:
without it, or with it misspelt, the command must do something else in one of the worlds.
"""

from __future__ import annotations

import posixpath
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import islice

from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Turn
from pivotrl.verifiers import sandbox
from pivotrl.verifiers.visible_files import visible_files

_NAMES = re.compile(r"(?<![\w./-])[\w./][\w./-]*")
_WORD = re.compile(r"[^\s;|&<>()]+")
_HIDES = re.compile(r"/dev/null|\|\||[2&]>|>&")  # errors that do not show
_MAX_MADE_UP = 24
_MAX_WORDS = 24  # that are tried, of each command
# Of every made-up file: lines that options of common tools tell apart, and its name.
_CONTENT = (
    "first line of {name}\n2 two\n10 ten,\tTEN\n2 two\n\nLine  3: a=b;c:d\n  indented\n{name} and more\n"
    + "".join(f"{n} row {n * 7 % 23}\n" for n in range(1, 25))
    + "last line of {name}\n"
)
_MAX_CHARACTERS = 2_000_000  # of all files together


class SandboxComparison:
    """Raises UserError when made where no sandbox works: commands never run outside one."""

    def __init__(self, seconds: float) -> None:
        if reason := sandbox.unusable():
            raise UserError(
                f"verifier shell: option 'execution' runs commands in a sandbox only, and none works here: {reason}. "
                "Mend that, or set execution: false."
            )
        self.limits = sandbox.Limits(seconds=seconds)

    def compare(self, turn: Turn, expected: str, actual: str, cwd: str | None) -> tuple[bool | None, str]:
        """(same, why); None where the sandbox cannot tell: a time-out, an outcome that varies, nothing to see."""
        try:
            known = _known_files(turn, cwd)
            worlds = [known, {**_made_up(expected, actual, known), **known}]
            told: tuple[bool | None, str] = None, "nothing_to_see"
            seen: list[tuple[Mapping[str, str], sandbox.Effect]] = []
            for world in worlds:
                before, done = sandbox.run("true", world, self.limits), sandbox.run(expected, world, self.limits)
                if not _shows(done, before):
                    continue
                told = sandbox.compare_execution(expected, actual, world, self.limits)
                if not told[0]:
                    return told
                seen.append((world, done))
            if told[0]:
                whole = seen[0][0] is known and not _HIDES.search(expected + "\0" + actual)
                if word := self._without_effect(expected, actual, seen, options=not whole):
                    return None, f"without_effect: {word}"
        except UserError as error:  # a path that the sandbox does not hold
            return None, f"not_runnable: {error}"
        return told

    def _without_effect(
        self, expected: str, actual: str, seen: list[tuple[Mapping[str, str], sandbox.Effect]], options: bool
    ) -> str | None:
        """A word of one command alone that changes nothing in any world where both did the same; None: there is none.

        `options`: they count as words. They need not where the state shows all that the commands work on.
        """
        for command, other in ((expected, actual), (actual, expected)):
            for changed, word in islice(_without_each(command, other, options), _MAX_WORDS + 1):
                if all(_same(sandbox.run(changed, world, self.limits), done) for world, done in seen):
                    return word
        return None


def _without_each(command: str, other: str, options: bool) -> Iterator[tuple[str, str]]:
    """(`command` with one word changed, that word) for each word that `other` has not; an option is left out, any
    other word misspelt."""
    left = Counter(_WORD.findall(other))
    for found in _WORD.finditer(command):
        word = found[0]
        if left[word]:
            left[word] -= 1
            continue
        if word.startswith("-") and not options:
            continue
        changed = "" if word.startswith("-") else f"{word}zz"
        yield command[: found.start()] + changed + command[found.end() :], word


def _same(one: sandbox.Effect, other: sandbox.Effect) -> bool:
    return (one.exit_code, one.stdout, one.stderr, one.files) == (
        other.exit_code,
        other.stdout,
        other.stderr,
        other.files,
    )


def _shows(done: sandbox.Effect, before: sandbox.Effect) -> bool:
    """Whether the demonstrated command ended well and left or said something, so that another can be held against it.

    A complaint on stderr is not well: `grep x missing | wc -l` ends with 0.
    """
    return done.exit_code == 0 and not done.stderr and bool(done.stdout.strip() or done.files != before.files)


def _known_files(turn: Turn, cwd: str | None) -> dict[str, str]:
    """What the state shows whole, by absolute path and, below the working directory, by relative path too."""
    files: dict[str, str] = {}
    room = _MAX_CHARACTERS
    for path, known in visible_files(turn, cwd).items():
        if known.whole is None or len(known.whole) > room:
            continue
        room -= len(known.whole)
        for name in _places(path, cwd):
            files[name] = known.whole
    return _without_parents(files)


def _places(path: str, cwd: str | None) -> list[str]:
    """Names under which the sandbox can hold a file."""
    places = []
    if path.startswith("/"):
        full = posixpath.normpath(path)
        if cwd and full.startswith(cwd.rstrip("/") + "/"):
            places.append(posixpath.relpath(full, cwd))
    else:
        full = posixpath.normpath(posixpath.join(sandbox.WORK, path))
        places.append(posixpath.normpath(path))
    if path.startswith("/") and sandbox.may_hold(full):
        places.append(full)
    return [place for place in places if place.startswith("/") or not place.startswith("..")]


def _made_up(expected: str, actual: str, known: Mapping[str, str]) -> dict[str, str]:
    """A small file of its own for every name in the commands that could be a file and is not known."""
    made: dict[str, str] = {}
    for name in sorted({*_NAMES.findall(expected), *_NAMES.findall(actual)}):
        plain = posixpath.normpath(name)
        if plain in known or plain.startswith("..") or plain in (".", "/") or plain.isdigit():
            continue
        if plain.startswith("/") and not sandbox.may_hold(plain):
            continue
        made[plain] = _CONTENT.format(name=plain)
        if len(made) == _MAX_MADE_UP:
            break
    return {name: text for name, text in _without_parents({**made, **known}).items() if name in made}


def _without_parents(files: Mapping[str, str]) -> dict[str, str]:
    """Files whose name is not the directory of another."""
    parents = {name[:i] for name in files for i, char in enumerate(name) if char == "/" and i}
    return {name: text for name, text in files.items() if name not in parents}
