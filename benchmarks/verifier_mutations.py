"""What the shell and edit verifiers say of changed actions: `python -m benchmarks.verifier_mutations [--json]`.

Every turn of the shared terminal and software-engineering trajectories ($PIVOTRL_SHARED/data) by the rules of
`domain=terminal` and `domain=swe`: the demonstration, its commands written otherwise or doing something else, and the
general mutations of `pivotrl audit-verifier`. Ends with 1 where an action that does the same is rejected, one that does
not is accepted, or a verifier raises.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

from pivotrl.configuration import load_config
from pivotrl.trajectories.reader import read_trajectories
from pivotrl.trajectories.schema import Action, ToolCall, Trajectory, Turn
from pivotrl.trajectories.turns import split_turns
from pivotrl.verifiers.audit import DEMONSTRATION
from pivotrl.verifiers.bash_ast import canonical
from pivotrl.verifiers.calls import HARMLESS_ARGUMENTS, last_observation
from pivotrl.verifiers.edits import EditsVerifier
from pivotrl.verifiers.guard import INVALID_REWARD, VERIFIER_ERROR
from pivotrl.verifiers.mutations import BREAKING, PRESERVING, Mutation, mutations
from pivotrl.verifiers.registry import get_verifier
from pivotrl.verifiers.shell import ShellVerifier
from pivotrl.verifiers.shell_tables import TOOLS
from pivotrl.verifiers.terminus import TerminusError, at_shell_prompt, parse_terminus

DOMAINS = ("terminal", "swe")
_SPECIAL = re.compile(r"[^\w\s./,:@%+&|;=-]|\n")
_BUNDLED = re.compile(r"\b(ls|grep|rm|cp|wc|sort|mkdir|du|cat|diff) -([a-zA-Z]{2,})(?=\s|$)")
# How long a command may take, a remark, lines that a view shows beyond the demonstrated ones: free.
FREE = HARMLESS_ARGUMENTS | {"view_range", "limit", "end_line"}
SAME = {
    "blank space around": "  {}  ",
    "newlines around": "\n\n{}\n",
    "a comment before": "# first\n{}",
    "a comment after": "{}\n# last",
}
OTHER = {
    "negated": "! {}",
    "assignment before": "FOO=1 {}",
    "a letter more": "{}x",
    "echoed": "echo {}",
    "sudo": "sudo {}",
    "after true &&": "true && {}",
    "after true;": "true; {}",
    "reads a pipe": "true | {}",
    "elsewhere": "cd /nowhere && {}",
    "in a subshell": "({})",
    "and one more": "{} && id",
    "twice": "{}\n{}",
    "destructive": "rm -rf /",
    "nothing": "true",
    "empty": "",
}


def turns_of(folder: Path) -> Iterator[Turn]:
    for path in sorted(folder.glob("*.json*")):
        for trajectory in read_trajectories(str(path), "auto"):
            if isinstance(trajectory, Trajectory):
                yield from (t for t in split_turns(trajectory, "train") if isinstance(t, Turn))


def changed_commands(turn: Turn) -> Iterator[Mutation]:
    """The demonstration with its first shell command changed by each template."""
    shell, prompt = ShellVerifier({}), at_shell_prompt(last_observation(turn))
    calls = turn.demonstration.tool_calls
    place = next((i for i, c in enumerate(calls) if shell.command_field(c)), None)
    if place is not None:
        field = str(shell.command_field(calls[place]))
        command = calls[place].arguments[field]
        if isinstance(command, str) and calls[place].arguments.get("is_input") not in (True, "true"):
            for kind, effect, text in _changed(command, field == "keystrokes", prompt):
                call = ToolCall(calls[place].name, {**calls[place].arguments, field: text})
                action = replace(turn.demonstration, tool_calls=(*calls[:place], call, *calls[place + 1 :]))
                yield Mutation(kind, effect, action)
    elif not calls:
        try:
            first = parse_terminus(turn.demonstration.text).keystrokes[:1]
        except TerminusError:
            return
        row = json.JSONDecoder().raw_decode(turn.demonstration.text, turn.demonstration.text.find("{"))[0]
        for kind, effect, text in _changed(first[0], True, prompt) if first else ():
            commands = [{**row["commands"][0], "keystrokes": text}, *row["commands"][1:]]
            yield Mutation(kind, effect, Action(json.dumps({**row, "commands": commands})))


def _changed(command: str, typed: bool, prompt: bool) -> Iterator[tuple[str, str, str]]:
    """(kind, effect, text). What bash does not understand is compared as text: only other commands are tried then."""
    body, end = (command.rstrip("\n"), "\n" if command.endswith("\n") else "") if typed else (command, "")
    if not body.strip() or (typed and not end):
        return
    understood = canonical(body) is not None and "<<" not in body and (prompt or not typed)
    for kind, template in SAME.items() if understood and not typed else ():
        yield kind, PRESERVING, template.replace("{}", body)
    for kind, text in _rewritten(body) if understood else ():
        yield kind, PRESERVING, text + end
    for kind, template in OTHER.items():
        text = template.replace("{}", body) + end
        if text.strip() != command.strip():
            yield kind, BREAKING, text


def _rewritten(command: str) -> Iterator[tuple[str, str]]:
    """The same command with its options apart, or a word in quotes, where nothing in it is quoted or expanded."""
    if _SPECIAL.search(command):
        return
    apart = _BUNDLED.sub(
        lambda m: f"{m[1]} -" + " -".join(m[2]) if {*m[2]} <= TOOLS[m[1]].flags.keys() else m[0], command
    )
    if apart != command:
        yield "options apart", apart
    head, space, last = command.rpartition(" ")
    if space and head.strip() and re.fullmatch(r"[\w./-]+", last):
        yield "last word quoted", f"{head} '{last}'"
        yield "first word quoted", re.sub(r"^(\s*)([\w./-]+)", r'\1"\2"', command)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, help="at most this many of each domain (default: all)")
    parser.add_argument("--examples", action="store_true", help="print wrong verdicts")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on the last line")
    given = parser.parse_args(arguments)
    data = Path(os.environ.get("PIVOTRL_SHARED", "../shared")) / "data"
    counts: dict[
        tuple[str, str], dict[str, list[int]]
    ] = {}  # (effect, kind) -> domain -> [tried, accepted, unscorable]
    turns, wrong, raised = dict.fromkeys(DOMAINS, 0), 0, 0
    for domain in DOMAINS:
        verifier = get_verifier(load_config([f"domain={domain}"]).domain.verifier)
        assert isinstance(verifier.inner, (ShellVerifier, EditsVerifier))
        for turn in islice(turns_of(data / domain), given.turns):
            turns[domain] += 1
            own = Mutation("demonstration", DEMONSTRATION, turn.demonstration)
            for mutation in (own, *changed_commands(turn), *mutations(turn)):
                if mutation.kind.startswith("value") and mutation.where.rpartition(" ")[2] in FREE:
                    continue
                if mutation.kind == "calls_reversed":  # of commands and edits the order decides
                    mutation = replace(mutation, effect=BREAKING)
                verdict = verifier.verify(turn, mutation.action)
                row = counts.setdefault((mutation.effect, mutation.kind), {}).setdefault(domain, [0, 0, 0])
                row[0] += 1
                row[1] += verdict.reward == 1.0
                row[2] += verdict.reward is None
                raised += verdict.reason in (VERIFIER_ERROR, INVALID_REWARD)
                right = 1.0 if mutation.effect in (DEMONSTRATION, PRESERVING) else 0.0
                if verdict.reward not in (right, None):
                    wrong += 1
                    if given.examples:
                        print(turn.id, mutation.kind, verdict.reason, json.dumps(mutation.action.to_json())[:300])
    print(table(counts, turns))
    print(f"\nwrong verdicts: {wrong}; raised: {raised}")
    if given.json:
        print(json.dumps({"turns": turns, "wrong": wrong, "raised": raised}))
    return int(bool(wrong or raised))


def table(counts: dict[tuple[str, str], dict[str, list[int]]], turns: dict[str, int]) -> str:
    """A Markdown table, one kind of change a row: accepted of tried, for each domain."""
    heads = " | ".join(f"{domain} ({count} turns): accepted of tried" for domain, count in turns.items())
    order = (DEMONSTRATION, PRESERVING)
    lines = [f"| change | does | {heads} |", "| --- " * (2 + len(turns)) + "|"]
    for effect, kind in sorted(counts, key=lambda key: (order.index(key[0]) if key[0] in order else 2, key)):
        cells = []
        for domain in turns:
            tried, accepted, unscorable = counts[effect, kind].get(domain, [0, 0, 0])
            cells.append(
                f"{accepted} of {tried}" + (f" ({unscorable} unscorable)" if unscorable else "") if tried else "–"
            )
        does = "the same" if effect in order else "another thing"
        lines.append(f"| {kind.replace('_', ' ')} | {does} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
