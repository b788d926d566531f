"""Bad input, as a user meets it: exit code 2 and a message that says what is wrong, or an audited skip."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from pivotrl.cli import main
from pivotrl.io import read_json, read_jsonl, write_jsonl
from tests.tiny_models import save_tiny

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


def trajectory(i: int, words: int = 3) -> dict[str, Any]:
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    return {
        "id": f"t{i}",
        "tools": [TOOL],
        "messages": [
            {"role": "user", "content": "please " * words},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "{}"},
            {"role": "assistant", "content": "done"},
        ],
    }


def run(*args: str) -> int:
    return main([*args, "tracking=disabled"])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


def test_missing_file(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert run("turns", "trajectories.path=no/such.jsonl", f"run_dir={run_dir}") == 2
    assert "no/such.jsonl" in capsys.readouterr().err


def test_empty_file(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "empty.jsonl").write_text("")
    assert run("turns", f"trajectories.path={tmp_path / 'empty.jsonl'}", f"run_dir={run_dir}") == 2
    assert "empty.jsonl" in capsys.readouterr().err


def test_no_assistant_turn(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "users.jsonl"
    path.write_text(json.dumps({"id": "a", "messages": [{"role": "user", "content": "hi"}]}) + "\n")
    assert run("turns", f"trajectories.path={path}", f"run_dir={run_dir}") == 2
    assert "no turn was kept" in capsys.readouterr().err
    (row,) = read_jsonl(run_dir / "turns" / "skipped.jsonl")
    assert (row["line"], row["reason"]) == (1, "no_assistant_turn")
    assert not (run_dir / "turns" / "summary.json").exists()


def test_one_bad_row_does_not_lose_the_others(run_dir: Path, tmp_path: Path):
    path = tmp_path / "mixed.jsonl"
    path.write_text(json.dumps(trajectory(0)) + "\nnot json\n" + json.dumps(trajectory(1)) + "\n")
    assert run("turns", f"trajectories.path={path}", f"run_dir={run_dir}") == 0
    counts = read_json(run_dir / "turns" / "summary.json")["trajectories"]
    assert (counts["read"], counts["kept"], sum(counts["skipped"].values())) == (3, 2, 1)


def test_no_pivot_kept(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    write_jsonl(run_dir / "profile" / "turns.jsonl", [{"turn_id": "a#0", "rewards": [1, 1], "mean": 1.0}])
    (run_dir / "profile" / "summary.json").write_text("{}")
    assert run("select", f"run_dir={run_dir}") == 2
    assert "no pivot kept" in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, smollm2_tokenizer: Path) -> Path:
    folder = tmp_path_factory.mktemp("model")
    save_tiny("llama", folder, vocab_size=49152)
    for file in smollm2_tokenizer.iterdir():
        if file.name not in ("config.json", "generation_config.json"):
            shutil.copy(file, folder / file.name)
    return folder


def turns(run_dir: Path, rows: list[dict[str, Any]]) -> list[str]:
    path = run_dir.parent / "rows.jsonl"
    write_jsonl(path, rows)
    data = [
        f"trajectories.path={path}",
        f"run_dir={run_dir}",
        "trajectories.warmup_fraction=0",
        "trajectories.validation_fraction=0",
        "warmup.steps=0",
    ]
    assert run("turns", *data) == 0
    return data


def test_model_folder_without_a_tokenizer(
    run_dir: Path, tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, bare / name)
    data = turns(run_dir, [trajectory(0)])
    assert run("profile", *data, f"model.path={bare}", "model.context_length=256") == 2
    error = capsys.readouterr().err
    assert "tokenizer" in error
    assert str(bare) in error


def test_every_prompt_is_longer_than_the_context(run_dir: Path, model: Path, capsys: pytest.CaptureFixture[str]):
    data = turns(run_dir, [trajectory(0, words=400)])
    assert run("profile", *data, f"model.path={model}", "model.context_length=256") == 2
    assert "beyond_context" in capsys.readouterr().err
    skipped = list(read_jsonl(run_dir / "profile" / "skipped.jsonl"))
    assert "beyond_context" in {row["reason"] for row in skipped}
    assert any("> context 256 tokens" in row["detail"] for row in skipped)


def test_a_stage_without_the_one_before_says_which_to_run(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert run("train", f"run_dir={run_dir}", "trajectories.path=x.jsonl") == 2
    assert "pivotrl " in capsys.readouterr().err
