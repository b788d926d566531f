"""The image, as far as it can be held to something without Docker: lint, files, versions, path of installation."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
HADOLINT = Path(sys.executable).with_name("hadolint")
PINS = dict(
    line.split("==") for line in (ROOT / "requirements" / "gpu.txt").read_text().split() if re.match(r"[\w-]+==", line)
)


def extra(name: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [Requirement(text) for text in project["optional-dependencies"][name]]


def test_lint() -> None:
    program = str(HADOLINT) if HADOLINT.exists() else shutil.which("hadolint")
    if program is None:
        pytest.skip("no hadolint (make install-dev, on x86-64)")
    done = subprocess.run([program, "Dockerfile"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_every_copied_file_is_there_and_in_the_context() -> None:
    copied = [w for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.M) for w in line.split()[1:-1]]
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert len(copied) > 5
    for name in copied:
        assert (ROOT / name).exists()
        assert name in allowed


def test_nothing_runs_as_root_and_the_base_is_pinned() -> None:
    users = re.findall(r"^USER (\S+)$", DOCKERFILE, re.M)
    assert users == ["10001:10001"]
    after = DOCKERFILE.split("USER 10001:10001")[1]
    assert not re.search(r"apt-get|sudo|useradd", after)
    assert re.search(r"^FROM nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3 AS pivotrl$", DOCKERFILE, re.M)


def test_pins_satisfy_the_extras_and_leave_none_of_the_engines_open() -> None:
    wanted = [*extra("gpu"), *extra("wandb"), *extra("tensorboard")]
    assert {r.name for r in wanted} == set(PINS)
    for requirement in wanted:
        assert requirement.specifier.contains(PINS[requirement.name]), requirement
    nemo = re.search(r"nemo-toolkit\[nlp\]==([\d.]+)", DOCKERFILE)
    assert nemo
    assert extra("nemo")[0].specifier.contains(nemo[1])


def test_the_image_takes_the_path_of_make_install_gpu() -> None:
    steps = re.findall(r"^RUN make (\S+)", DOCKERFILE, re.M)
    assert steps == [".venv/.packages-gpu", "install-gpu"]
    plan = subprocess.run(["make", "-n", "-B", "install-gpu"], cwd=ROOT, capture_output=True, text=True, check=True)
    for words in ("python3.12 -m venv", "--no-build-isolation", "pip install -q --no-deps -e ."):
        assert words in plan.stdout
    assert plan.stdout.count("-c requirements/gpu.txt") == 3


def test_every_version_is_on_the_index(tmp_path: Path) -> None:
    """Network: only where PIVOTRL_INDEX_PYTHON names a Python 3.12 with pip. Reads metadata and downloads no wheel."""
    python = os.environ.get("PIVOTRL_INDEX_PYTHON")
    if python is None:
        pytest.skip("PIVOTRL_INDEX_PYTHON names no Python 3.12")
    nemo = re.findall(r"nemo-toolkit\[nlp\]==[\d.]+", DOCKERFILE)
    pins = [f"{name}=={version}" for name, version in PINS.items()]
    resolve = [python, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "-q"]
    report = tmp_path / "report.json"
    done = subprocess.run([*resolve, "--report", report, *pins, *nemo], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(report.read_text())["install"]) == len(pins) + 1
