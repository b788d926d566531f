"""`python -m benchmarks` (make bench): the short benchmarks, one after another, each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

SHORT = ("refit", "generation", "verifiers_shell", "verifiers_calls", "verifiers_runner", "verifier_mutations")


def main() -> int:
    """Run each with the arguments given here (`--json`); the exit code is the worst of theirs."""
    worst = 0
    for name in SHORT:
        print(f"== benchmarks.{name}", flush=True)
        worst = max(worst, subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *sys.argv[1:]]).returncode)
    return worst


if __name__ == "__main__":
    sys.exit(main())
