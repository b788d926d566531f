"""`swe_pivot` of NeMo-Gym (method.md 4.5): tool category, target, difflib similarity. A baseline; see nemo_gym.py."""

from __future__ import annotations

import json
import re
from difflib import SequenceMatcher
from typing import Any

from pivotrl.trajectories.schema import Action, JsonDict, Turn
from pivotrl.verifiers.base import Verdict
from pivotrl.verifiers.options import one_of, read_options, within

CATEGORIES = {
    "edit": "str_replace_editor text_editor file_editor code_editor edit_file modify_file update_file file_edit edit "
    "modify apply_patch patch_file apply_diff apply_changes write write_file save_file create_file",
    "bash": "execute_bash run_bash bash_exec shell_run shell bash terminal shell_command shell_cmd run_shell_cmd "
    "exec_command exec_cmd",
    "search": "grep search_text find_pattern text_search glob find_files file_glob match_files grep_files search_files "
    "find_in_files code_search list_dir ls show_dir ls_dir list_directory",
    "read": "read read_file view_file cat_file view file_view inspect show_file read_file_content",
    "finish": "finish submit",
    "think": "think",
    "planning": "task_tracker todo_tracker plan_tracker todo_read todo_write update_plan list_tasks update_tasks "
    "read_todos write_todos edit_plan modify_plan",
}
# `read_file`, `ReadFile` and `readfile` are one name.
_CATEGORY_OF = {
    spelling: category
    for category, names in CATEGORIES.items()
    for tool in names.split()
    for spelling in (tool, tool.replace("_", ""))
}
_PATH = re.compile(r"""(?:^|[\s='"(])((?:/[\w.-]+)+|\.\.?/[\w./-]+|[\w.-]+/[\w./-]+)""")
_COMPARED = 2000  # characters; what differs after them is not seen


class SwePivot:
    """Category of the tool, then target, then similarity of the arguments; only the first call counts.

    Options: `reward_mode` ("binary" | "continuous"), `enable_target_match`, `enable_argument_similarity`,
    `similarity_threshold` (0.4) and `similarity_full_credit` (0.8), `enable_diff_size_shaping`, `diff_size_alpha`
    (0.1). Binary: 1 at full credit. Continuous: 0.5 to 1 between the two, times 1 - alpha * min(edit length / 500,
    1). The paper's rule for SWE is the category alone: both `enable_*` false.

    Lets through: `{}` for any command; `rm -rf src` for `ls src` behind the same long `cd`; any pattern in a search of
    the same path; edits that differ after 2,000 characters; whatever follows the first call. Rejects wrongly:
    `FOO=1 pytest` for `pytest`, any rewording of a short command.
    """

    name = "swe_pivot"
    version = "1"
    ignores_thinking = True

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = read_options(
            self.name,
            options,
            {
                "reward_mode": "binary",
                "enable_target_match": True,
                "enable_argument_similarity": True,
                "similarity_threshold": 0.4,
                "similarity_full_credit": 0.8,
                "enable_diff_size_shaping": True,
                "diff_size_alpha": 0.1,
            },
        )
        one_of(self.name, "reward_mode", self.options["reward_mode"], ("binary", "continuous"))
        within(self.name, "diff_size_alpha", self.options["diff_size_alpha"], 0, 1)
        within(self.name, "similarity_full_credit", self.options["similarity_full_credit"], 0, 1)
        full = self.options["similarity_full_credit"]
        within(self.name, "similarity_threshold", self.options["similarity_threshold"], 0, full)

    def config(self) -> dict[str, Any]:
        return dict(self.options)

    def verify(self, turn: Turn, action: Action) -> Verdict:
        if not turn.demonstration.tool_calls:
            return Verdict(None, "demonstration_not_a_call")
        if action.problems:
            return Verdict(0.0, "malformed", {"problems": list(action.problems)})
        if not action.tool_calls:
            return Verdict(0.0, "no_call")
        expected, actual = turn.demonstration.tool_calls[0], action.tool_calls[0]
        kind = category(expected.name)
        same_name = expected.name.lower() == actual.name.lower()
        if not same_name and (kind == "unknown" or category(actual.name) != kind):
            return Verdict(0.0, "tool_name_mismatch")
        try:
            return self._arguments(kind, expected.arguments, actual.arguments)
        except (RecursionError, ValueError) as error:
            return Verdict(None, "not_comparable", {"error": f"{type(error).__name__}: {error}"[:200]})

    def _arguments(self, kind: str, expected: JsonDict, actual: JsonDict) -> Verdict:
        o = self.options
        if o["enable_target_match"] and not same_target(kind, expected, actual):
            return Verdict(0.0, "target_mismatch")
        reward, details = 1.0, {}
        if o["enable_argument_similarity"]:
            similarity = argument_similarity(kind, expected, actual)
            details["similarity"] = similarity
            low, full = o["similarity_threshold"], o["similarity_full_credit"]
            if similarity < (full if o["reward_mode"] == "binary" else low):
                return Verdict(0.0, "similarity_below_threshold", details)
            if similarity < full:
                reward = 0.5 + 0.5 * (similarity - low) / (full - low)
        if o["enable_diff_size_shaping"] and o["reward_mode"] == "continuous" and kind == "edit":
            reward *= 1 - o["diff_size_alpha"] * min(len(_content(actual)) / 500, 1.0)
        return Verdict(reward, "match" if reward == 1.0 else "partial", details)


def category(tool: str) -> str:
    return _CATEGORY_OF.get(tool.lower(), "unknown")


def _first(arguments: JsonDict, *keys: str) -> str:
    return next((str(arguments[key]).strip() for key in keys if key in arguments), "")


def _path(arguments: JsonDict) -> str:
    return _first(arguments, "path", "file", "file_path", "filename", "file_name")


def _suffix(path: str, parts: int) -> list[str]:
    return path.strip("/").split("/")[-parts:]


def _ratio(a: str, b: str) -> float:
    return SequenceMatcher(None, a[:_COMPARED], b[:_COMPARED]).ratio()


def _range(value: Any) -> tuple[int, int] | None:
    try:
        start, end = json.loads(value) if isinstance(value, str) else value
        return int(start), int(end)
    except (ValueError, TypeError):
        return None


def _content(arguments: JsonDict) -> str:
    if "new_str" in arguments:
        return f"{arguments.get('old_str', '')}\n{arguments['new_str']}"
    return next((str(arguments[k]) for k in ("patch", "diff", "content", "file_text") if k in arguments), "")


def same_target(kind: str, expected: JsonDict, actual: JsonDict) -> bool:
    """Level 1. Whatever is absent on either side passes."""
    if kind == "edit":
        commands = [str(row.get("command", "")) for row in (expected, actual)]
        if all(commands) and commands[0] != commands[1]:
            return False
        paths = [_path(row) for row in (expected, actual)]
        if all(paths) and _suffix(paths[0], 2) != _suffix(paths[1], 2):
            return False
        ours, theirs = _range(expected.get("view_range")), _range(actual.get("view_range"))
        if commands == ["view", "view"] and ours and theirs:
            covered = max(0, min(ours[1], theirs[1]) - max(ours[0], theirs[0]))
            return covered / max(1, ours[1] - ours[0]) >= 0.8
        return True
    if kind == "bash":
        one, two = (_first(row, "command", "cmd") for row in (expected, actual))
        if not one or not two:
            return True
        if one.split()[0].rpartition("/")[2] != two.split()[0].rpartition("/")[2]:
            return False
        named = [
            {tuple(_suffix(p, 3)) for p in _PATH.findall(text) if len(p) > 2 and p[:2] != "--"} for text in (one, two)
        ]
        if all(named) and not named[0] & named[1]:
            return False
        return _ratio(two, one) >= 0.3
    if kind in ("search", "read"):
        paths = [_path(row) for row in (expected, actual)]
        return not all(paths) or _suffix(paths[0], 3) == _suffix(paths[1], 3)
    return True


def argument_similarity(kind: str, expected: JsonDict, actual: JsonDict) -> float:
    """Level 2, in [0, 1]; 1 where there is nothing to compare."""
    if kind == "bash":
        one, two = (_first(row, "command", "cmd") for row in (expected, actual))
        return _ratio(two, one) if one and two else 1.0
    if kind != "edit":
        return 1.0
    pairs = [(str(expected.get(k, "")), str(actual.get(k, ""))) for k in ("old_str", "new_str")]
    if any(e for e, _ in pairs) and any(a for _, a in pairs):
        return min(_ratio(a, e) if a and e else float(a == e) for e, a in pairs)
    one, two = _content(expected), _content(actual)
    return _ratio(two, one) if one and two else float(bool(one) == bool(two))
