"""The command line: help, suggestions, exit codes, and what it does not import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pivotrl import cli
from pivotrl.stages import STAGES

HEAVY = ("torch", "transformers", "vllm", "megatron", "wandb", "numpy")
PROBE = f"""
import sys
from pivotrl import cli
code = cli.main(sys.argv[1:])
heavy = [m for m in {HEAVY!r} if m in sys.modules]
print("heavy:", heavy, "hydra:", "hydra" in sys.modules)
sys.exit(code)
"""


def probe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])
    return subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        cwd=folder,
        env={"PYTHONPATH": root, "PATH": "/usr/bin:/bin", "HOME": str(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_imports_neither_engines_nor_hydra(tmp_path: Path, arguments: list[str]) -> None:
    done = probe(tmp_path, *arguments)
    assert done.returncode == 0
    assert "heavy: [] hydra: False" in done.stdout


def test_turns_imports_no_engine(tmp_path: Path) -> None:
    row = {
        "id": "t0",
        "messages": [
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": "What is your order number?"},
        ],
        "tools": [],
    }
    rows = [{**row, "id": f"t{i}"} for i in range(12)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    done = probe(tmp_path, "turns", "trajectories.path=rows.jsonl", "run_dir=run")
    assert done.returncode == 0, done.stderr
    assert "heavy: []" in done.stdout
    assert json.loads((tmp_path / "run/turns/summary.json").read_text())
    assert (tmp_path / "run/turns/config.yaml").is_file()


def test_overview_lists_every_stage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    for name in [*STAGES, "run", "verify", "fetch-model", "show-config"]:
        assert f"\n  {name} " in text


@pytest.mark.parametrize("stage", [*STAGES, "run", "verify", "fetch-model", "show-config"])
def test_each_stage_has_its_own_help(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([stage, "--help"]) == 0
    text = capsys.readouterr().out
    assert f"usage: pivotrl {stage}" in text
    assert f"pivotrl {stage} " in text.split("Example:")[1]


def test_keys_and_examples_in_the_help_exist() -> None:
    from pivotrl.config import Config
    from pivotrl.configuration import load_config
    from pivotrl.strict import is_known

    for stage in STAGES.values():
        load_config(stage.example.split()[2:])
        named = [key.partition("=")[0] for key in (*stage.overrides, *stage.config, *stage.inputs)]
        assert [key for key in named if not is_known(Config, key)] == []
        assert all(up in STAGES for up in stage.upstream)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian"], "Did you mean 'train'?"),
        (["train", "steps"], "'steps' is no override"),
        (["train", "--stepz", "3"], "no option --stepz"),
        (["train", "++algorithm.clip_hgh=1"], "did you mean 'algorithm.clip_high'?"),
        (["verify"], "give --input FILE"),
        (["verify", "--input"], "--input needs a value"),
        (["fetch-model", "model.path=/x"], "no built-in model"),
        (["turns", "trajectories.path=/nowhere"], "no such file or folder"),
        (["turns"], "nothing to learn from"),
    ],
)
def test_bad_input_exits_2_with_what_to_do(
    arguments: list[str],
    expected: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    text = capsys.readouterr().err
    assert expected in text
    assert "Traceback" not in text
    assert not list(tmp_path.glob("*"))


def test_show_config_prints_yaml_and_conflicts(capsys: pytest.CaptureFixture[str]) -> None:
    import yaml

    assert cli.main(["show-config", "algorithm.steps=7", "algorithm.group_size=1"]) == 0
    text = capsys.readouterr().out
    assert yaml.safe_load(text)["algorithm"]["steps"] == 7
    assert "group_size=1" in text.split("# Conflicts")[1]


def test_config_dir_adds_own_groups(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 77\n")
    assert cli.main(["show-config", "--config-dir", str(tmp_path), "experiment=mine"]) == 0
    assert "seed: 77" in capsys.readouterr().out
