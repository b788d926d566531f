"""Every command that a document shows is one that works: run here or, where it is long, taken apart and checked."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from experiments import study
from experiments.arms import chosen
from pivotrl.cli import main
from pivotrl.cli_help import OTHER_COMMANDS
from pivotrl.configuration import load_config
from pivotrl.stages import STAGES

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]


def commands(start: str) -> list[tuple[str, list[str]]]:
    """(document, words) of every command that starts so: an indented or fenced line, or a span in backticks."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8").replace("\\\n", " ")
        lines = [m.group(1) for m in re.finditer(rf"^(?: {{4}})?({start}[^\n]*)$", text, re.MULTILINE)]
        spans = [" ".join(m.group(1).split()) for m in re.finditer(rf"`({start}[^`]*)`", text)]
        for line in lines + spans:
            words = shlex.split(line, comments=True)
            if all("..." not in word for word in words):
                found.append((document.name, words))
    return found


def overrides(words: list[str]) -> list[str]:
    values = {"FILE": "rows.jsonl", "DIR": "models/some"}
    pairs = [word.split("=", 1) for word in words if "=" in word]
    return [f"{k}={values.get(v, v.split('|')[0])}" for k, v in pairs]


@pytest.mark.parametrize(("document", "words"), commands("pivotrl "))
def test_pivotrl_commands(document: str, words: list[str]):
    stage = words[1] if len(words) > 1 else "--help"
    if stage.startswith(("-", "<")):
        return
    known = {*STAGES, *OTHER_COMMANDS}
    assert stage in known, f"{document}: {' '.join(words)}"
    assert main([stage, "--help"]) == 0
    load_config(overrides(words))


@pytest.mark.parametrize(("document", "words"), commands("make "))
def test_make_targets(document: str, words: list[str]):
    done = subprocess.run(["make", "-n", *words[1:]], cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, f"{document}: {' '.join(words)}: {done.stderr}"


@pytest.mark.parametrize(("document", "words"), commands(r"(?:\.venv/bin/)?python -m "))
def test_modules(document: str, words: list[str]):
    module = words[words.index("-m") + 1]
    assert importlib.util.find_spec(module) is not None, f"{document}: {module}"
    if module == "pytest":
        paths = [word for word in words[words.index("pytest") + 1 :] if word.startswith("tests")]
        assert all((REPOSITORY / path).exists() for path in paths)
    if module == "experiments.study":
        args = study.parse(words[words.index(module) + 1 :])
        chosen(args.arms.split(","))
        load_config([f"experiment={args.experiment}", *overrides(args.overrides)])


def test_there_are_commands_to_test():
    assert len(commands("pivotrl ")) >= 5
    assert len(commands("make ")) >= 4


def test_files_that_documents_name_exist():
    for document in DOCUMENTS:
        for name in re.findall(
            r"`((?:docs|conf|pivotrl|tests|benchmarks|slurm|launch)/[\w./-]+)`", document.read_text()
        ):
            assert (REPOSITORY / name.rstrip("/")).exists(), f"{document.name} names {name}"
