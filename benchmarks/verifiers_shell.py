"""Verdicts a second of the shell and edit verifiers on one core: `python -m benchmarks.verifiers_shell [--json]`.

Each demonstration is judged against the same spelt otherwise, and against another command or edit. Every round has
texts not seen before, so that no cache of parsed commands helps.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Iterator

from pivotrl.trajectories.schema import Action, JsonDict, ToolCall, Turn
from pivotrl.verifiers.base import Verifier
from pivotrl.verifiers.edits import EditsVerifier
from pivotrl.verifiers.shell import ShellVerifier

TARGETS = {"shell": 1000.0, "edits": 500.0}  # verdicts a second
COMMANDS = (
    ("ls -la src{n}", "ls -l -a ./src{n}", "ls -l src{n}"),
    (
        "cd /r{n} && python -m pytest -q -x tests/test_a.py",
        "cd /r{n}/ && python -m pytest -xq tests/test_a.py",
        "pytest {n}",
    ),
    (
        "grep -rn 'def f{n}' src | head -20",
        'grep -r -n "def f{n}" src | head -n 20',
        "grep -rn 'def g{n}' src | head -20",
    ),
    (
        "find . -name '*.py' -exec grep -l x{n} {{}} \\;",
        "find . -name \"*.py\" -exec grep -l x{n} '{{}}' ';'",
        "find . {n}",
    ),
    ("for i in 1 2 3; do echo $i >> out{n}; done", "for i in 1 2 3\ndo\n echo ${{i}} >>out{n}\ndone", "echo {n}"),
    (
        "cat > f{n}.py << 'EOF'\n" + "print('line')\n" * 40 + "EOF",
        "cat << 'E' > f{n}.py\n" + "print('line')\n" * 40 + "E",
        "cat f{n}.py",
    ),
)


def call(tool: str, **arguments: object) -> Action:
    return Action(tool_calls=(ToolCall(tool, arguments),))


def turn(demonstration: Action, messages: list[JsonDict] | None = None) -> Turn:
    return Turn("t#0", "t", "t", 0, "swe", "train", messages or [], [], demonstration)


def shell_pairs() -> Iterator[tuple[Turn, Action, float]]:
    n = 0
    while True:
        n += 1
        for expected, same, other in COMMANDS:
            t = turn(call("bash", command=expected.format(n=n)))
            yield t, call("bash", command=same.format(n=n)), 1.0
            yield t, call("bash", command=other.format(n=n)), 0.0


def edit_pairs() -> Iterator[tuple[Turn, Action, float]]:
    """Edits of a file of 400 lines that the state shows, by str_replace with more or less context."""
    lines = [f"def f{i}(x):\n    return x + {i}\n" for i in range(200)]
    read: JsonDict = {"id": "c", "name": "read", "arguments": {"path": "/r/a.py"}}
    n = 0
    while True:
        n += 1
        state: list[JsonDict] = [
            {"role": "assistant", "tool_calls": [read]},
            {"role": "tool", "tool_call_id": "c", "content": f"# {n}\n" + "".join(lines)},
        ]
        old, new = f"    return x + {n % 200}\n", f"    return x - {n}\n"
        head = f"def f{n % 200}(x):\n"
        t = turn(call("edit", path="/r/a.py", old_str=old, new_str=new), state)
        yield t, call("edit", path="/r/a.py", old_str=head + old, new_str=head + new), 1.0
        yield t, call("edit", path="/r/a.py", old_str=head + old, new_str=head + old + new), 0.0


def rate(
    verifier: Verifier,
    stream: Iterable[tuple[Turn, Action, float | None]],
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Verdicts a second; raises if a known verdict is not the expected one (a fast wrong answer is worth nothing)."""
    spent, count = 0.0, 0
    for turn, action, reward in stream:
        start = clock()
        verdict = verifier.verify(turn, action)
        spent += clock() - start
        count += 1
        if reward is not None and verdict.reward != reward:
            raise AssertionError(f"{verdict} for {action} against {turn.demonstration}")
        if spent > seconds:
            break
    return count / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=2.0, help="time to measure each verifier for")
    parser.add_argument("--json", action="store_true", help="the figures as JSON on the last line")
    arguments = parser.parse_args()
    figures = {
        "shell": rate(ShellVerifier({}), shell_pairs(), arguments.seconds),
        "edits": rate(EditsVerifier({}), edit_pairs(), arguments.seconds),
    }
    for name, value in figures.items():
        print(f"{name:6} {value:10,.0f} verdicts a second on one core (target {TARGETS[name]:,.0f})")
    if arguments.json:
        print(json.dumps({f"{name}_verdicts_per_second": round(value, 1) for name, value in figures.items()}))


if __name__ == "__main__":
    main()
