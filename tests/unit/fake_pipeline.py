"""A pivotrl command whose stages are fakes: `python fake_pipeline.py <stage|run> overrides`. Not a test.

Each fake appends to <run_dir>/calls.log and writes its summary. FAKE_<STAGE>=crash|user|hang|kill changes one;
FAKE_VERSION is PivotRL's.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from pivotrl import cli, pipeline, stage_state, stages
from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.io import write_json


def _fake(name: str) -> Any:
    def run(cfg: Config, run_dir: Path) -> dict[str, Any]:
        part = run_dir / name / "part.txt"
        with (run_dir / "calls.log").open("a") as log:
            log.write(f"{name} {'continued' if part.exists() else 'fresh'}\n")
        part.write_text(str(os.getpid()))
        mode = os.environ.get(f"FAKE_{name.upper()}")
        if mode == "crash":
            raise RuntimeError("the engine broke")
        if mode == "user":
            raise UserError("the file is bad")
        if mode == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if mode == "hang":
            time.sleep(60)
        summary = {"turns": cfg.trajectories.tasks if name == "turns" else 1, "seconds": time.time()}
        write_json(run_dir / name / "summary.json", summary)
        return summary

    return run


def install() -> None:
    module = sys.modules[__name__]
    for name, stage in stages.STAGES.items():
        setattr(module, f"fake_{name}", _fake(name))
        stages.STAGES[name] = dataclasses.replace(stage, module=__name__, function=f"fake_{name}")


def main() -> int:
    install()
    stage_state.__version__ = os.environ.get("FAKE_VERSION", stage_state.__version__)
    pipeline.COMMAND = (sys.executable, __file__)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
