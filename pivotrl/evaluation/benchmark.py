"""`pivotrl evaluate benchmark=...`: a harness of evaluation/harnesses.py against a served checkpoint."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.evaluation.harnesses import HARNESSES, Harness, merged_options, plan
from pivotrl.generation import serving
from pivotrl.io import keeps_books, write_json
from pivotrl.ports import free_port
from pivotrl.rendering.chat import Renderer
from pivotrl.setup import start_policy
from pivotrl.stage_state import benchmark_place

_CHECKPOINT = {"sft": "sft", "pivotrl": "train", "e2e": "e2e"}


def run_benchmark(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Check, serve, run and read; writes benchmarks/<name>-<policy>/summary.json. Only the first rank works.

    Raises UserError where the harness or something it needs is missing, where the model is not served, and where the
    harness fails: then there is no score at all, rather than a low one.
    """
    b = cfg.benchmark
    assert b.name is not None
    if not keeps_books():
        return {}
    started = time.monotonic()
    harness = HARNESSES[b.name]
    check_installed(harness, b.name)
    options = merged_options(harness, b.name, b.options)
    out = run_dir / benchmark_place(cfg)
    with _base_url(cfg, run_dir, out / "server.log") as url:
        check_served(url, b.model, b.api_key)
        if other := options.get("user_base_url"):
            served_models(str(other), b.api_key, "benchmark.options.user_base_url")
        values = {
            "python": sys.executable,
            "out": str(out),
            "base_url": url,
            "model": b.model,
            "api_key": b.api_key,
            "tasks": b.tasks,
            "trials": b.trials,
            "concurrency": b.concurrency,
        }
        unset = {name: text for name, text in harness.where_unset.items() if name not in os.environ}
        environment = {name: text.format_map(values) for name, text in {**harness.environment, **unset}.items()}
        for command in plan(harness, b.name, b.options, values):
            _run(command, environment, out, b.max_hours * 3600 - (time.monotonic() - started))
    found = harness.read(out)
    if found["success"] is None:
        raise UserError(f"benchmark={b.name}: the harness ended well and left no score in {out}; see {out}/harness.log")
    summary = {
        "benchmark": b.name,
        "title": harness.title,
        "policy": b.policy if b.base_url is None else b.model,
        "options": options,
        **found,
        "seconds": time.monotonic() - started,
    }
    write_json(out / "summary.json", summary)
    return summary


def check_installed(harness: Harness, name: str) -> None:
    """Raises UserError that lists everything missing, with what to do."""
    missing = [f"the command {one}" for one in harness.executables if shutil.which(one) is None]
    missing += [f"the Python module {one}" for one in harness.modules if importlib.util.find_spec(one) is None]
    if missing:
        raise UserError(
            f"benchmark={name} ({harness.title}) lacks {', '.join(missing)}.\n"
            f"Install: {harness.install}.\nIt also needs {harness.needs}. See docs/benchmarks.md"
        )


def check_served(base_url: str, model: str, api_key: str) -> None:
    """Raises UserError where no server answers at `base_url`, or it serves other models."""
    names = served_models(base_url, api_key, "benchmark.base_url")
    if model not in names:
        raise UserError(f"benchmark.model={model} is not served at {base_url}; it serves {', '.join(names)}")


def served_models(base_url: str, api_key: str, key: str) -> list[str]:
    """The models of an OpenAI-compatible server. Raises UserError, naming configuration `key`, where none answers."""
    request = urllib.request.Request(f"{base_url}/models", headers={"Authorization": f"Bearer {api_key}"})
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return [str(one["id"]) for one in json.load(answer)["data"]]
    except (urllib.error.URLError, ConnectionError, TimeoutError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{key}={base_url}: no OpenAI-compatible server answers there ({error}); start one"
            + (", or leave base_url=null to serve the checkpoint for this run" if key == "benchmark.base_url" else "")
        ) from error


@contextlib.contextmanager
def _base_url(cfg: Config, run_dir: Path, log: Path) -> Iterator[str]:
    b = cfg.benchmark
    if b.base_url is not None:
        yield b.base_url.rstrip("/")
        return
    stage = _CHECKPOINT.get(b.policy)
    folder = start_policy(cfg, run_dir) if stage is None else run_dir / stage / "checkpoint"
    if not folder.is_dir():
        raise UserError(
            f"benchmark.policy={b.policy}: no checkpoint at {folder}: run `pivotrl {stage} run_dir={run_dir}` first, "
            "or give benchmark.base_url of a served model"
        )
    port = free_port()
    with serving.served([*server_words(cfg, folder, port, log.parent), *b.serve_arguments], port, log) as url:
        yield url


def server_words(cfg: Config, folder: Path, port: int, out: Path) -> list[str]:
    """The command that serves a checkpoint with the template that it is trained and measured with here."""
    renderer = Renderer(folder, cfg.model.chat_template, cfg.domain.action_format)
    template = None
    if renderer.template is not None:
        out.mkdir(parents=True, exist_ok=True)
        template = out / "chat_template.jinja"
        template.write_text(renderer.template, encoding="utf-8")
    parallel, length = cfg.generation.tensor_parallel, cfg.model.context_length
    arguments = (folder, cfg.benchmark.model, port, length, parallel, cfg.domain.action_format)
    return serving.server_command(*arguments, renderer.thinking_open, template)


def _run(command: Sequence[str], environment: dict[str, str], out: Path, seconds: float) -> None:
    """One command of a harness, in the benchmark's folder, its output in harness.log."""
    out.mkdir(parents=True, exist_ok=True)
    log = out / "harness.log"
    with log.open("ab") as file:
        file.write(f"$ {' '.join(command)}\n".encode())
        file.flush()
        try:
            done = subprocess.run(
                command,
                cwd=out,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=max(seconds, 1.0),
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise UserError(
                f"{command[0]} was stopped after benchmark.max_hours; what it left is in {out} (most harnesses go on "
                "from there when the same command is run again)"
            ) from error
    if done.returncode:
        raise UserError(
            f"{command[0]} failed with exit {done.returncode}: no score is taken from a harness that broke.\n"
            f"Its last lines ({log}):\n{serving.tail(log)}"
        )
