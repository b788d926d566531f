"""The data path starts fast and runs anywhere: it imports no engine and no numerics."""

from __future__ import annotations

import subprocess
import sys

MODULES = "pivotrl.turns_stage, pivotrl.verifiers.registry, pivotrl.verifiers.rows, pivotrl.rendering.chat"
HEAVY = {"torch", "transformers", "vllm", "megatron", "numpy", "jinja2"}


def test_no_heavy_import() -> None:
    code = f"import sys, {MODULES}; print(*sorted({HEAVY} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
