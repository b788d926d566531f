"""Terminus-1 and Terminus-2 actions: a JSON object with keystroke batches and a completion flag (method.md 4.4)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from pivotrl.trajectories.schema import JsonDict
from pivotrl.verifiers.bash_ast import canonical, is_empty

_KEY = re.compile(r"(?:[CMS]-)+\S+|Enter|Escape|Space|Tab|BSpace|Up|Down|Left|Right|Home|End|PageUp|PageDown|F\d{1,2}")
# A screen that ends like this takes input for something else than a shell.
_OTHER_PROMPT = re.compile(
    r"(?:>>>|\.\.\.|^>|In \[\d+\]:|\(Pdb\)|\(gdb\)|sqlite>|mysql>|postgres\S*[#>]|\w+=[#>]|ftp>|irb\S*>|quote>"
    r"|\(END\)|^:|^~)\s*$"
)
# Programs that read what is typed next.
_READS_TERMINAL = frozenset(
    {
        "vi",
        "vim",
        "nvim",
        "nano",
        "emacs",
        "less",
        "more",
        "man",
        "top",
        "htop",
        "ssh",
        "telnet",
        "ftp",
        "sftp",
        "gdb",
        "pdb",
        "mysql",
        "psql",
        "sqlite3",
        "redis-cli",
        "mongo",
        "mongosh",
        "node",
        "ipython",
        "irb",
        "ghci",
        "R",
        "julia",
        "bc",
        "dc",
        "ed",
        "screen",
        "tmux",
        "bash",
        "sh",
        "zsh",
        "fish",
        "su",
        "read",
        "passwd",
        "dd",
        "docker",
        "podman",
        "kubectl",
        "nc",
        "ncat",
        "socat",
        "expect",
        "openssl",
        "crontab",
        "visudo",
        "view",
        "vimdiff",
        "ex",
        "lldb",
        "watch",
        "script",
        "lynx",
        "w3m",
        "lua",
        "octave",
        "swipl",
        "ocaml",
        "scala",
        "sbcl",
        "guile",
        "tclsh",
        "maxima",
        "gp",
        "duckdb",
    }
)
_READS_WITHOUT_OPERANDS = frozenset(
    {"cat", "python", "python3", "tee", "sort", "wc", "head", "tail", "grep", "sed", "awk", "perl", "ruby", "php", "tr"}
)


class TerminusError(ValueError):
    """The text is not a sound Terminus action; the message is a short machine name."""


@dataclass(frozen=True)
class TerminusAction:
    harness: str  # "terminus_1" | "terminus_2"
    keystrokes: tuple[str, ...]
    complete: bool


_SCHEMAS: dict[str, dict[str, Any]] = {
    "terminus_1": {
        "text": ("state_analysis", "explanation"),
        "flag": "is_task_complete",
        "waits": ("is_blocking", "timeout_sec"),
    },
    "terminus_2": {"text": ("analysis", "plan"), "flag": "task_complete", "waits": ("duration",)},
}


def parse_terminus(text: str) -> TerminusAction:
    """The action in `text`: one JSON object, alone, in a code fence, or with prose around it (the harness ignores it).

    Raises TerminusError: no object, two objects, a key twice, a field missing, unknown or of a wrong type.
    """
    row = _load_object(text)
    harness = next((h for h, known in _SCHEMAS.items() if all(name in row for name in known["text"])), None)
    if harness is None:
        raise TerminusError("fields_missing")
    schema = _SCHEMAS[harness]
    if set(row) - {*schema["text"], schema["flag"], "commands"} or not all(
        isinstance(row[n], str) for n in schema["text"]
    ):
        raise TerminusError("fields_unknown_or_mistyped")
    flag = row.get(schema["flag"], False)
    commands = row.get("commands")
    if not isinstance(flag, bool) or not isinstance(commands, list):
        raise TerminusError("fields_unknown_or_mistyped")
    return TerminusAction(harness, tuple(_keystrokes(command, schema["waits"]) for command in commands), flag)


def _keystrokes(command: Any, waits: tuple[str, ...]) -> str:
    if (
        not isinstance(command, dict)
        or set(command) - {"keystrokes", *waits}
        or not isinstance(command.get("keystrokes"), str)
    ):
        raise TerminusError("command_mistyped")
    for name in waits:
        if name in command and type(command[name]) not in ((bool,) if name == "is_blocking" else (int, float)):
            raise TerminusError("command_mistyped")
    return str(command["keystrokes"])


def _load_object(text: str) -> JsonDict:
    start = text.find("{")
    if start < 0:
        raise TerminusError("no_json")
    decoder = json.JSONDecoder(object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    try:
        row, end = decoder.raw_decode(text, start)
    except (ValueError, RecursionError):
        raise TerminusError("broken_json") from None
    if "{" in text[end:]:
        raise TerminusError("two_objects")
    return dict(row)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> JsonDict:
    if len({key for key, _ in pairs}) != len(pairs):
        raise ValueError("duplicate key")
    return dict(pairs)


def _no_constant(name: str) -> Any:
    raise ValueError(name)


def at_shell_prompt(screen: str) -> bool:
    """Whether what is typed next goes to a shell, by the last line on the screen; no screen counts as a shell."""
    lines = screen.rstrip().splitlines()
    return not lines or not _OTHER_PROMPT.search(lines[-1])


def keystrokes_form(keystrokes: tuple[str, ...], shell: bool, cwd: str | None) -> tuple[Any, ...]:
    """Canonical form of a batch: what is typed, statement by statement where it goes to a shell, else to the letter.

    How the text is cut into batches and how long each waits is free. A command without its newline is not run yet.
    """
    form: list[Any] = []
    typed = ""
    for item in (*keystrokes, None):
        if item is not None and not _KEY.fullmatch(item):
            typed += item
            continue
        if typed:
            pieces, prompt = _typed_form(typed, shell, cwd if not form else None)
            form.extend(pieces)
            shell = shell and prompt
            typed = ""
        if item is not None:
            form.append(("key", item))
            shell = shell and item in ("C-c", "Enter")
    return tuple(form)


def _typed_form(text: str, shell: bool, cwd: str | None) -> tuple[list[Any], bool]:
    """The form of what is typed, and whether a shell reads what comes after it."""
    parsed = canonical(text, True, cwd) if shell else None
    if parsed is None or is_empty(parsed):
        return [("typed", text)], False
    reads = [_reads_terminal(statement) for statement in parsed[1:]]
    if any(reads[:-1]):
        return [("typed", text)], False
    return [*parsed[1:], *([] if text.endswith("\n") else ["not_run"])], not reads[-1]


def _reads_terminal(statement: Any) -> bool:
    """Whether a top-level statement may take the next lines as its input."""
    if not isinstance(statement, tuple) or statement[0] in ("verbatim", "assign"):
        return False
    if statement[0] in ("list", "pipeline"):
        return any(_reads_terminal(part) for part in statement[1:])
    if statement[0] != "command" or any(redirect[0].startswith("<") for redirect in statement[3]):
        return False
    words = statement[2]
    while words[:1] == ("wrapped",):  # sudo, time, nohup...
        words = words[2]
    name = words[1] if words[:1] == ("words",) and len(words) > 1 else words[0] if words else ""
    operands = words[2:] if words[:1] == ("words",) else words[-1] if words else ()
    return name in _READS_TERMINAL or (name in _READS_WITHOUT_OPERANDS and not operands)
