"""Runners of the real harnesses: a fake harness on PATH drives a scripted model server."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from pivotrl.cli import main
from pivotrl.config import Benchmark, Config
from pivotrl.configuration import load_config
from pivotrl.errors import UserError
from pivotrl.evaluation import benchmark
from pivotrl.evaluation.harnesses import HARNESSES, plan
from pivotrl.generation import serving
from pivotrl.io import read_json
from pivotrl.ports import free_port

VALUES = {
    "python": "python",
    "out": "/out",
    "base_url": "http://h/v1",
    "model": "m",
    "api_key": "k",
    "tasks": None,
    "trials": 3,
    "concurrency": 2,
}


class _Model(BaseHTTPRequestHandler):
    """An OpenAI-compatible server that says the same thing to everyone."""

    def _send(self, value: object) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self._send({"data": [{"id": "pivotrl"}]})

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "pivotrl"
        self._send({"choices": [{"message": {"role": "assistant", "content": "scripted"}}]})

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    http = ThreadingHTTPServer(("127.0.0.1", 0), _Model)
    threading.Thread(target=http.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{http.server_address[1]}/v1"
    http.shutdown()
    http.server_close()


HARNESS = """#!{python}
import json, os, pathlib, sys, urllib.request
assert os.environ["OPENAI_API_KEY"] == "{key}"  # litellm refuses to start without one
words = dict(zip(sys.argv[1::1], sys.argv[2::1]))
llm = json.loads(words["--agent-llm-args"])
body = json.dumps({{"model": words["--agent-llm"].removeprefix("openai/"), "messages": []}}).encode()
answer = json.load(urllib.request.urlopen(llm["api_base"] + "/chat/completions", body))
said = answer["choices"][0]["message"]["content"]
if words["--domain"] == "{broken}":
    sys.exit("the user simulator is down")
rows = [{{"task_id": i, "trial": t, "reward_info": {{"reward": float(said == "scripted" and i > t)}}}}
        for i in range(int(words["--num-tasks"])) for t in range(int(words["--num-trials"]))]
rows.append({{"task_id": "x", "trial": 0, "reward_info": None}})
place = pathlib.Path(words["--save-to"] + ".json")
place.parent.mkdir(parents=True, exist_ok=True)
place.write_text(json.dumps({{"simulations": rows}}))
place.with_name(place.stem + "_results.json").write_text(json.dumps({{"pass_hat_1": 0.5}}))
"""


@pytest.fixture
def tau2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "tau2"
    program.write_text(HARNESS.format(python=sys.executable, broken="telecom", key="EMPTY"))
    program.chmod(0o755)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    return program


def arguments(run_dir: Path, url: str, domains: str) -> list[str]:
    return [
        *("evaluate", "benchmark=tau2", f"run_dir={run_dir}", f"benchmark.base_url={url}", "benchmark.tasks=2"),
        *("benchmark.trials=2", "benchmark.options.user_model=openai/user", f"benchmark.options.domains={domains}"),
        "tracking=disabled",
    ]


def test_a_harness_runs_against_a_served_model(tau2: Path, server: str, tmp_path: Path):
    run_dir = tmp_path / "run"
    assert main(arguments(run_dir, server, "[retail,airline]")) == 0
    summary = read_json(run_dir / "benchmarks" / "tau2-pivotrl" / "summary.json")
    # task 0 never succeeds, task 1 in its first trial alone; what the harness could not judge is no failure
    assert (summary["success"], summary["n"], summary["errors"]) == (0.25, 4, 2)
    assert list(summary["by"]) == ["airline", "retail"]
    assert summary["by"]["retail"]["per_task"] == {"0": 0.0, "1": 0.5}
    log = (run_dir / "benchmarks" / "tau2-pivotrl" / "harness.log").read_text()
    assert log.count("$ tau2 run") == 2
    assert not (run_dir / "evaluate").exists()  # beside the run's own evaluation, not in its place


def test_the_key_of_another_users_model_is_kept(
    tau2: Path, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    tau2.write_text(HARNESS.format(python=sys.executable, broken="-", key="sk-mine"))
    monkeypatch.setenv("OPENAI_API_KEY", "sk-mine")
    assert main(arguments(tmp_path / "run", server, "[retail]")) == 0


def test_a_harness_that_breaks_gives_no_score(tau2: Path, server: str, tmp_path: Path, capsys):
    run_dir = tmp_path / "run"
    assert main(arguments(run_dir, server, "[retail,telecom]")) == 2
    said = capsys.readouterr().err
    assert "exit 1" in said
    assert "the user simulator is down" in said
    assert not (run_dir / "benchmarks" / "tau2-pivotrl" / "summary.json").exists()


def test_what_is_missing_is_told_at_once(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch, tau2: Path):
    def told(**changes: object) -> str:
        values = {"name": "tau2", "base_url": server, "options": {"user_model": "u"}, **changes}
        cfg = Config(benchmark=Benchmark(**values))  # type: ignore[arg-type]
        with pytest.raises(UserError) as error:
            benchmark.run_benchmark(cfg, tmp_path)
        return str(error.value)

    assert "benchmark.options.user_model=" in told(options={})
    assert "benchmark.options of tau2: unknown option 'speed'" in told(options={"speed": 1})
    assert "option 'domains' is 'retail'; it must be of type list" in told(options={"domains": "retail"})
    assert "no OpenAI-compatible server answers" in told(base_url="http://127.0.0.1:9/v1")
    assert "user_base_url" in told(options={"user_model": "u", "user_base_url": "http://127.0.0.1:9/v1"})
    assert "serves pivotrl" in told(model="other")
    assert "pivotrl train" in told(base_url=None)
    monkeypatch.setenv("PATH", str(tmp_path))
    text = told(name="swe_bench")
    assert all(part in text for part in ("mini-extra", "docker", "swebench", "pip install"))


@pytest.mark.parametrize("name", HARNESSES)
def test_commands_of_every_harness(name: str):
    harness = HARNESSES[name]
    given = dict.fromkeys(harness.required, "grader-or-user")
    lines = plan(harness, name, given, VALUES)
    assert len(lines) == len(harness.commands) * (3 if name == "tau2" else 1)
    assert all("None" not in word and "{" not in word.replace('{"', "") for line in lines for word in line)
    limited = plan(harness, name, {**given, "arguments": ["--seed", 7]}, {**VALUES, "tasks": 5})
    assert len(limited[0]) == len(lines[0]) + 4
    assert limited[0][-2:] == ["--seed", "7"]
    if name == "tau2":
        assert json.loads(lines[0][lines[0].index("--agent-llm-args") + 1])["api_base"] == "http://h/v1"
    if name == "browsecomp":  # the task's defaults are no browsing, and the evaluated model as its own judge
        assert {"with_browsing=True", "scorer_model=grader-or-user"} <= set(lines[0])
    for text in harness.environment.values():
        assert text.format_map(VALUES)
    assert load_config([f"benchmark={name}"]).benchmark.name == name


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def test_results_of_the_other_harnesses(tmp_path: Path):
    report = {"resolved_instances": 2, "submitted_instances": 8, "error_instances": 1}
    for told, errors in (({}, 1), ({"error_ids": ["a"], "infra_failure_ids": ["a", "b"]}, 2)):  # of swebench 5
        write(tmp_path / "m.pivotrl.json", report | told)
        found = HARNESSES["swe_bench"].read(tmp_path)
        assert (found["success"], found["n"], found["errors"]) == (0.25, 8, errors)

    for i, result in enumerate(
        ({"reward": 1.0}, {"reward": 0.0}, None),
    ):
        trial = {"task_name": "t", "verifier_result": {"rewards": result} if result else None}
        write(tmp_path / "jobs" / "pivotrl" / f"t__{i}" / "result.json", trial)
    found = HARNESSES["terminal_bench"].read(tmp_path)
    assert (found["success"], found["n"], found["trials"], found["errors"]) == (0.5, 1, 2, 1)

    # What inspect-evals 0.26 leaves.
    scores = [{"metrics": {"browse_comp_accuracy": {"value": 0.1}, "calibration_error": {"value": 0.6}}}]
    results = {"total_samples": 10, "completed_samples": 9, "scores": scores}
    write(tmp_path / "logs" / "a.json", {"status": "success", "results": results})
    found = HARNESSES["browsecomp"].read(tmp_path)
    assert (found["success"], found["n"], found["errors"]) == (0.1, 9, 1)

    values = {"ifeval": {"alias": "ifeval", "prompt_level_strict_acc,none": 0.4, "inst_level_strict_acc,none": 0.6}}
    values["gsm8k"] = {"exact_match,strict-match": 0.2, "exact_match_stderr,strict-match": 0.01}
    counts = {"ifeval": {"effective": 541}, "gsm8k": {"effective": 10}}
    write(tmp_path / "lm_eval" / "m" / "results_1.json", {"results": values, "n-samples": counts})
    found = HARNESSES["lm_eval"].read(tmp_path)
    assert (found["success"], found["n"]) == (pytest.approx(0.3), 551)
    for name in HARNESSES:
        assert HARNESSES[name].read(tmp_path / "empty")["success"] is None


SERVER = """
import http.server, sys
class H(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.send_header("Content-Length", "0"); self.end_headers()
    def log_message(self, *a): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), H).serve_forever()
"""


def test_a_server_is_waited_for_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "server.py"
    script.write_text(SERVER)
    monkeypatch.setattr(serving, "SERVER", (sys.executable, str(script)))
    port = free_port()
    command = serving.server_command(tmp_path, "pivotrl", port, 4096, 2, "hermes")
    assert command[-3:] == ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with serving.served(command, port, tmp_path / "log") as url:
        assert url == f"http://127.0.0.1:{port}/v1"
    with pytest.raises(UserError, match="no OpenAI-compatible"):
        benchmark.check_served(url, "pivotrl", "")
    script.write_text("import sys; sys.exit('out of memory')")
    with (
        pytest.raises(UserError, match="out of memory"),
        serving.served(command, port, tmp_path / "log2"),
    ):
        raise AssertionError("a server that ended was used")
    script.write_text("import time; time.sleep(60)")
    with (
        pytest.raises(UserError, match="did not answer"),
        serving.served(command, port, tmp_path / "log3", 0.5),
    ):
        raise AssertionError("a server that hangs was used")
