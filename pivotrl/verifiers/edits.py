"""Functional verifier of software-engineering actions: edits by the file they leave, views by what they cover.

Shell calls are judged as in shell.py, all others by their arguments."""

from __future__ import annotations

from typing import Any

from pivotrl.errors import UserError
from pivotrl.trajectories.schema import Action, JsonDict, ToolCall, Turn
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.calls import (
    check_options,
    decide,
    same_arguments,
    same_call,
    tool_schemas,
    working_directory,
)
from pivotrl.verifiers.edit_calls import PATH_FIELDS, EditCall, View, edit_call, full_path, same_spelling, view_call
from pivotrl.verifiers.patches import Edit, EditError, Hunk, Operation, Replace, Write, apply
from pivotrl.verifiers.python_code import same_python
from pivotrl.verifiers.shell import OPTIONS as SHELL_OPTIONS
from pivotrl.verifiers.shell import ShellVerifier
from pivotrl.verifiers.visible_files import Known, visible_files

_GAP = "\n\0 unseen \0\n"  # between the pieces of a file that is not known whole
_SHORT = 20  # characters: a shorter search text is not trusted to be unique in a file that is not known whole
_SEARCH_NAMES = ("grep", "search", "find", "glob", "list", "ls")
_CODE_FIELDS = ("code", "source", "python")


class EditsVerifier:
    """Options:
    python: "exact" (default), or "ast": in .py files comments and formatting are ignored.
    view_slack: lines that a view may show beyond the demonstrated range and still count as the same (default 100).
    tool, cwd, execution, execution_seconds, judge: as for the shell verifier, which judges shell calls and texts.
    """

    name = "edits"
    version = "3"

    def __init__(self, options: JsonDict | None = None) -> None:
        options = dict(options or {})
        check_options(self.name, options, ("python", "view_slack", *SHELL_OPTIONS))
        self.python = options.get("python", "exact")
        if self.python not in ("exact", "ast"):
            raise UserError(f"verifier 'edits': option 'python' must be 'exact' or 'ast', not {self.python!r}")
        self.slack = options.get("view_slack", 100)
        if not isinstance(self.slack, int) or isinstance(self.slack, bool) or self.slack < 0:
            raise UserError(f"verifier 'edits': option 'view_slack' must be a number of lines, not {self.slack!r}")
        self._seen: tuple[Turn, str | None, dict[str, Known]] | None = None  # the rollouts of a turn come together
        self.shell = ShellVerifier({k: options[k] for k in SHELL_OPTIONS if k in options})

    def config(self) -> JsonDict:
        return {"python": self.python, "view_slack": self.slack, **self.shell.config()}

    def verify(self, turn: Turn, action: Action) -> Verdict:
        expected = turn.demonstration.tool_calls
        if all(self.shell.command_field(call) for call in expected):  # text turns too
            return self.shell.verify(turn, action)
        decided = decide(turn, action)
        if decided is not None:
            return decided
        for i, (e, a) in enumerate(zip(expected, action.tool_calls)):
            if not same_spelling(e.arguments, a.arguments):
                return Verdict(0.0, "unknown_argument", {"tool": e.name, "call": i})
            if ({"command"} | _required(turn, e.name)) & (e.arguments.keys() - a.arguments.keys()):
                return Verdict(0.0, "missing_argument", {"tool": e.name, "call": i})
        cwd = working_directory(turn, self.shell.cwd)
        wanted = [edit_call(call, cwd) for call in expected]
        given = [edit_call(call, cwd) for call in action.tool_calls]
        names = [call.name for call in action.tool_calls]
        if all(wanted) and all(given) and names == [call.name for call in expected]:
            return self._compare_edits(turn, [e for e in wanted if e], [e for e in given if e], cwd)
        for i, (e, a) in enumerate(zip(expected, action.tool_calls)):
            verdict = self._compare(turn, e, a, cwd)
            if verdict.reward != 1.0:
                return Verdict(verdict.reward, verdict.reason, {**verdict.details, "call": i})
        return Verdict(1.0, "match")

    def _compare(self, turn: Turn, expected: ToolCall, actual: ToolCall, cwd: str | None) -> Verdict:
        if expected.name != actual.name or same_arguments(expected.arguments, actual.arguments, frozenset()):
            return same_call(turn, expected, actual)
        if self.shell.command_field(expected):
            return self.shell.compare(turn, expected, actual)
        wanted, given = edit_call(expected, cwd), edit_call(actual, cwd)
        if wanted and given:
            return self._compare_edits(turn, [wanted], [given], cwd)
        wanted_view, given_view = view_call(expected, cwd), view_call(actual, cwd)
        if wanted_view and given_view:
            return self._compare_views(turn, wanted_view, given_view, cwd)
        return self._compare_arguments(turn, expected, actual, cwd)

    def _compare_arguments(self, turn: Turn, expected: ToolCall, actual: ToolCall, cwd: str | None) -> Verdict:
        """Searches and unknown tools: arguments with paths in one spelling, Python code by its tree if asked for."""
        wanted, given = (self._spelt(turn, call, cwd) for call in (expected, actual))
        if self.python == "ast":
            for name in _CODE_FIELDS:
                a, b = wanted.get(name), given.get(name)
                if isinstance(a, str) and isinstance(b, str) and same_python(a, b):
                    given[name] = a
        return same_call(turn, ToolCall(expected.name, wanted), ToolCall(actual.name, given))

    def _spelt(self, turn: Turn, call: ToolCall, cwd: str | None) -> JsonDict:
        arguments = {
            k: full_path(v, cwd) if k in PATH_FIELDS and isinstance(v, str) else v for k, v in call.arguments.items()
        }
        if any(name in call.name.lower() for name in _SEARCH_NAMES):  # no path means the working directory
            free = {"path", "dir", "directory"} - _required(turn, call.name)
            arguments = {k: v for k, v in arguments.items() if not (k in free and v in (".", cwd))}
        return arguments

    def _files(self, turn: Turn, cwd: str | None) -> dict[str, Known]:
        seen = self._seen
        if seen is None or seen[0] is not turn or seen[1] != cwd:
            self._seen = seen = (turn, cwd, visible_files(turn, cwd))
        return seen[2]

    # Views --------------------------------------------------------------------------------------------------------

    def _compare_views(self, turn: Turn, expected: View, actual: View, cwd: str | None) -> Verdict:
        if actual.path != expected.path:
            return Verdict(0.0, "path_differs", {"expected": expected.path, "actual": actual.path})
        if not same_arguments(expected.rest, actual.rest):
            return Verdict(0.0, "argument_differs", {})
        details = {"expected": [expected.start, expected.end], "actual": [actual.start, actual.end]}
        end = actual.end
        if (expected.end is None) != (end is None):
            known = self._files(turn, cwd).get(expected.path)
            if known is None or known.whole is None:
                return Verdict(0.0, "range_differs", details)  # how far the end is, is not known
            length = known.whole.count("\n") + 1
            end, wanted_end = end or length, expected.end or length
        else:
            wanted_end = expected.end or 0
            end = end or 0
        if actual.start > expected.start or end < wanted_end:
            return Verdict(0.0, "range_not_covered", details)
        if (expected.start - actual.start) + (end - wanted_end) > self.slack:
            return Verdict(0.0, "range_too_wide", details)
        return Verdict(1.0, "match", details)

    # Edits --------------------------------------------------------------------------------------------------------

    def _compare_edits(self, turn: Turn, expected: list[EditCall], actual: list[EditCall], cwd: str | None) -> Verdict:
        if not all(same_arguments(e.rest, a.rest) for e, a in zip(expected, actual)):
            return Verdict(0.0, "argument_differs", {})
        wanted, given = _by_path(expected), _by_path(actual)
        if set(wanted) != set(given):
            return Verdict(0.0, "path_differs", {"expected": sorted(wanted), "actual": sorted(given)})
        if wanted == given:
            return Verdict(1.0, "match")
        files = self._files(turn, cwd)
        for path in wanted:
            reason = self._same_file(path, wanted[path], given[path], files.get(path, Known()))
            if reason is not None:
                return Verdict(0.0, reason, {"path": path})
        return Verdict(1.0, "same_file", {"paths": sorted(wanted)})

    def _same_file(self, path: str, wanted: list[Operation], given: list[Operation], known: Known) -> str | None:
        """None if both leave the same file, else the reason. The more of the file is known, the surer the answer."""
        if wanted == given:
            return None
        if known.whole is not None:
            left = _after(known.whole, wanted)
            if not isinstance(left, EditError):  # else the file is not what the state seemed to show
                right = _after(known.whole, given)
                if isinstance(right, EditError):
                    return "edit_does_not_apply"
                return None if self._same_content(path, left, right, known.newline) else "file_differs"
        if isinstance(wanted[-1], Write) and isinstance(given[-1], Write):
            same = self._same_content(path, wanted[-1].content, given[-1].content, True)
            return None if same else "file_differs"
        if any(_too_short(operation, wanted) for operation in given):
            return "edit_not_comparable"
        for base in [*known.parts, _GAP.join(_old_texts(wanted))]:
            left, right = _after(base, wanted), _after(base, given)
            if isinstance(left, EditError) or isinstance(right, EditError):
                continue
            return None if self._same_content(path, left, right, True) else "file_differs"
        return "edit_not_comparable"

    def _same_content(self, path: str, a: str | None, b: str | None, newline: bool) -> bool:
        if a is None or b is None:
            return a is b
        if not newline:
            a, b = a.rstrip("\n"), b.rstrip("\n")
        if a == b:
            return True
        if self.python != "ast" or not path.endswith(".py"):
            return False
        pieces_a, pieces_b = a.split(_GAP), b.split(_GAP)
        return len(pieces_a) == len(pieces_b) and all(same_python(x, y) for x, y in zip(pieces_a, pieces_b))


def _required(turn: Turn, tool: str) -> set[str]:
    """Arguments that the tool's schema requires."""
    listed = tool_schemas(turn).get(tool, {}).get("required")
    return {name for name in listed if isinstance(name, str)} if isinstance(listed, list) else set()


def _by_path(calls: list[EditCall]) -> dict[str, list[Operation]]:
    edits: list[Edit] = [edit for call in calls for edit in call.edits]
    found: dict[str, list[Operation]] = {}
    for path, operation in edits:
        found.setdefault(path, []).append(operation)
    return found


def _after(content: str | None, operations: list[Operation]) -> Any:
    """The content after all operations (None: deleted), or the EditError of the first that does not apply."""
    try:
        for operation in operations:
            content = apply(content, operation)
    except EditError as error:
        return error
    return content


def _old_texts(operations: list[Operation]) -> list[str]:
    """The text that the demonstration must have found in the file."""
    texts = []
    for operation in operations:
        if isinstance(operation, Replace):
            texts.append(operation.old)
        elif isinstance(operation, Hunk):
            texts.append("\n".join(operation.old))
    return texts


def _too_short(operation: Operation, wanted: list[Operation]) -> bool:
    """A search text that may well occur elsewhere in the unseen rest of the file, which then decides."""
    if not isinstance(operation, Replace):
        return False
    shortest = min((len(text.strip()) for text in _old_texts(wanted)), default=0)
    every = any(isinstance(w, Replace) and w.every for w in wanted)
    return len(operation.old.strip()) < min(shortest, _SHORT) or operation.every != every
