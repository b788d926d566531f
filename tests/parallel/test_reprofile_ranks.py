"""Re-profiling on two data-parallel processes gives the pivots, rollouts and steps of one (one launch)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from reprofile_ranks import CASES, STEPS, main

from pivotrl.io import read_json, read_jsonl
from pivotrl.rollouts import read_rollouts

SCRIPT = Path(__file__).with_name("reprofile_ranks.py")


def rows(path: Path) -> list[object]:
    return [{k: v for k, v in row.items() if not k.startswith("seconds")} for row in read_jsonl(path)]


@pytest.mark.parallel
def test_two_processes_reprofile_as_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    main(one)
    two.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*launch, str(SCRIPT), str(two)], env=environment, timeout=300, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr[-4000:]
    for name in CASES:
        alone = json.loads((one / name / "seen-0.json").read_text())
        first, second = (json.loads((two / name / f"seen-{rank}.json").read_text()) for rank in (0, 1))
        assert first["seen"] == second["seen"] == alone["seen"], name
        assert first["sampled"] + second["sampled"] == alone["sampled"]
        assert min(first["sampled"], second["sampled"]) > 0.4 * alone["sampled"]  # both engines work
        folders = sorted(p.name for p in (one / name / "train" / "reprofile").iterdir())
        assert folders and folders[0] == "step-000004" and len(folders) < STEPS
        assert sorted(p.name for p in (two / name / "train" / "reprofile").iterdir()) == folders
        for folder in folders:
            a, b = (root / name / "train" / "reprofile" / folder for root in (one, two))
            for file in ("profile/turns.jsonl", "select/pivots.jsonl", "sample/turns.jsonl"):
                assert rows(a / file) == rows(b / file), (name, folder, file)
            sampled = [
                [(r.turn_id, r.index, r.completion.token_ids) for r in read_rollouts(p / "sample" / "rollouts.jsonl")]
                for p in (a, b)
            ]
            assert sampled[0] == sampled[1]
            figures = [read_json(p / "summary.json") for p in (a, b)]
            for key in ("turns", "kept", "entered", "left", "mean_reward", "mixed", "rollouts"):
                assert figures[0][key] == figures[1][key], (name, folder, key)
