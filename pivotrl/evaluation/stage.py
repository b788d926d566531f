"""`pivotrl evaluate`: policies side by side, in one engine that is refitted from each checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from pivotrl.config import Config
from pivotrl.environments.registry import get_environment
from pivotrl.errors import UserError
from pivotrl.evaluation.benchmark import run_benchmark
from pivotrl.evaluation.drift_probe import DriftProbe
from pivotrl.evaluation.in_domain import EngineActor, evaluate_turns, play
from pivotrl.evaluation.out_of_domain import evaluate_set, joined
from pivotrl.evaluation.questions import QuestionSet, read_sets
from pivotrl.evaluation.statistics import paired_difference
from pivotrl.evaluation.tasks import evaluation_tasks
from pivotrl.generation.engine import Engine, Sampling
from pivotrl.io import append_jsonl, keeps_books, read_json, whole_rows, write_json, write_jsonl
from pivotrl.local_rollouts import LocalRoller, states_of
from pivotrl.models.folder import ModelFolder
from pivotrl.profiling.ledger import Cost
from pivotrl.profiling.profiler import draw_turns
from pivotrl.profiling.stage import read_turns
from pivotrl.setup import Workbench
from pivotrl.stopping import kept
from pivotrl.tracking.progress import progress

OOD = "ood/"  # of the parts that are a set of questions
Measure = Callable[[str], tuple[dict[str, Any], Cost]]  # policy's name -> what a part showed, and its cost
STAGE_OF = {"base": None, "sft": "sft", "pivotrl": "train", "e2e": "e2e"}


def checkpoints(cfg: Config, run_dir: Path, base: Path) -> dict[str, Path]:
    """Policy name -> Hugging Face folder. A policy whose stage has not run is an error, not a gap in the table."""
    found = {}
    for policy in cfg.evaluate.policies:
        stage = STAGE_OF[policy]
        folder = base if stage is None else run_dir / stage / "checkpoint"
        if not folder.exists():
            raise UserError(
                f"evaluate: no checkpoint of {policy!r} at {folder}: run `pivotrl {stage} run_dir={run_dir}` first, "
                f"or leave it out with evaluate.policies=[base]"
            )
        found[policy] = folder
    return found


class Measured:
    """What an evaluation has shown so far, in evaluate/measured.json: an interruption costs no more than one part."""

    def __init__(self, directory: Path):
        self.path, self.episodes = directory / "measured.json", directory / "episodes.jsonl"
        before = read_json(self.path) if self.path.is_file() else {}
        self.policies: dict[str, dict[str, Any]] = before.get("policies", {})  # policy -> part -> what it showed
        self.cost = Cost(**before.get("cost", {}))
        if self.episodes.is_file():  # those of a part that was not finished are played again
            rows = whole_rows(self.episodes)
            write_jsonl(self.episodes, (r for r in rows if r["mode"] in self.policies.get(r["policy"], {})))

    def keep(self, policy: str, part: str, found: dict[str, Any], cost: Cost) -> None:
        self.policies.setdefault(policy, {})[part] = found
        self.cost += cost
        write_json(self.path, {"policies": self.policies, "cost": self.cost.to_json()})
        kept()

    def results(self) -> dict[str, dict[str, Any]]:
        """Policy -> mode, "ood" or "drift" -> what it showed."""
        results = {}
        for policy, parts in self.policies.items():
            sets = {part.removeprefix(OOD): found for part, found in parts.items() if part.startswith(OOD)}
            rest = {part: found for part, found in parts.items() if not part.startswith(OOD) and part != "drift"}
            ood = {"ood": joined(sets)} if sets else {}
            results[policy] = rest | ood | ({"drift": parts["drift"]} if "drift" in parts else {})
        return results


class Evaluator:
    """The measurements of one policy; the engine holds its weights."""

    def __init__(self, cfg: Config, run_dir: Path, bench: Workbench, engine: Engine):
        self.cfg, self.run_dir, self.bench, self.engine = cfg, run_dir, bench, engine
        e = cfg.evaluate
        self.sets = read_sets(e.ood_path, e.ood_rows) if e.ood_path else []
        self.drift = DriftProbe(cfg, run_dir, bench, engine, self.sets) if e.drift else None
        name = cfg.environment.name
        self.environment = None if name is None else get_environment(name, cfg.environment.options)
        if self.environment is None:
            turns = draw_turns(read_turns(run_dir, "validation"), cfg.evaluate.tasks, cfg.seed)
            self.states, _ = states_of(turns, cfg, run_dir, bench.renderer, bench.verifier)
            if not self.states:
                raise UserError(
                    "evaluate: no held-out turn can be scored; raise trajectories.validation_fraction "
                    "or set environment.name"
                )

    def parts(self) -> dict[str, Measure]:
        """What is measured, in this order."""
        greedy = replace(self.bench.sampling, temperature=0.0)
        made: dict[str, Measure] = {"greedy": partial(self._in_domain, "greedy", greedy, 1)}
        if trials := self.cfg.evaluate.trials:
            made["sampled"] = partial(self._in_domain, "sampled", self.bench.sampling, trials)
        made |= {OOD + questions.name: partial(self._out_of_domain, questions) for questions in self.sets}
        if self.drift is not None:
            made["drift"] = partial(self._drift, self.drift)
        return made

    def _in_domain(self, mode: str, sampling: Sampling, trials: int, policy: str) -> tuple[dict[str, Any], Cost]:
        cfg, bench = self.cfg, self.bench
        if self.environment is None:
            roller = LocalRoller(self.engine, bench.renderer, bench.verifier, sampling)
            found = evaluate_turns(self.states, roller, trials, cfg.seed)
            return found, Cost(**found.pop("cost"))
        tasks = evaluation_tasks(cfg, self.run_dir, self.environment, cfg.evaluate.split, cfg.evaluate.tasks)
        actor = EngineActor(self.engine, bench.renderer, sampling, cfg.model.context_length, cfg.seed)
        found, rows = play(self.environment, tasks, trials, cfg.environment.max_turns, actor)
        episodes = self.run_dir / "evaluate" / "episodes.jsonl"
        append_jsonl(episodes, ({"policy": policy, "mode": mode, **row} for row in rows))
        return found, actor.spent

    def _out_of_domain(self, questions: QuestionSet, policy: str) -> tuple[dict[str, Any], Cost]:
        """Costs are those of episodes and held-out turns alone."""
        length, new = self.cfg.model.context_length, self.cfg.evaluate.ood_max_new_tokens
        return evaluate_set(questions, self.engine, self.bench.renderer, new, length), Cost()

    def _drift(self, probe: DriftProbe, policy: str) -> tuple[dict[str, Any], Cost]:
        return probe.measure(), Cost()


def differences(policies: dict[str, Any]) -> dict[str, Any]:
    """Paired differences of each policy to base, over the tasks both were judged on."""
    result: dict[str, Any] = {}
    for policy, measured in policies.items():
        if policy == "base" or "base" not in policies:
            continue
        for mode, row in measured.items():
            if "per_task" not in row:
                continue
            ours, theirs = row["per_task"], policies["base"][mode]["per_task"]
            shared = sorted(set(ours) & set(theirs))
            if shared:
                result.setdefault(f"{policy} - base", {})[mode] = paired_difference(
                    [ours[t] for t in shared], [theirs[t] for t in shared]
                )
    return result


def _note(policy: str, part: str, found: dict[str, Any]) -> str:
    """What the progress bar tells of a part."""
    if part == "drift":
        return f"{policy} drift"
    value = found["accuracy" if part.startswith(OOD) else "success"]
    return f"{policy} {part.removeprefix(OOD)} {'not judged' if value is None else f'{value:.2f}'}"


def _weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    model = ModelFolder(folder)
    for name in model.file_of:
        yield name, model.tensor(name)


def run_evaluate(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Measure every policy of `evaluate.policies`; writes evaluate/summary.json. With `benchmark=...`: that harness."""
    if cfg.benchmark.name is not None:
        return run_benchmark(cfg, run_dir)
    started = time.monotonic()
    bench = Workbench.build(cfg, run_dir)
    folders = checkpoints(cfg, run_dir, bench.start_policy)
    measured = Measured(run_dir / "evaluate")
    with bench.engine() as engine:
        evaluator = Evaluator(cfg, run_dir, bench, engine)
        parts, played = evaluator.parts(), evaluator.environment
        done = sum(map(len, measured.policies.values()))
        with progress(len(folders) * len(parts), "evaluate", done, "measurement") as bar:
            for version, (policy, folder) in enumerate(folders.items(), 1):
                left = [part for part in parts if part not in measured.policies.get(policy, {})]
                if left and folder != bench.start_policy:
                    engine.refit(_weights(folder), version=version)
                for part in left:
                    found, cost = parts[part](policy)
                    measured.keep(policy, part, found, cost)
                    bar.advance(1, _note(policy, part, found))
    policies, spent = measured.results(), measured.cost.to_json()
    summary = {
        "environment": cfg.environment.name,
        "environment_version": None if played is None else played.version,  # figures of two versions do not compare
        "split": cfg.evaluate.split,
        "policies": policies,
        "differences": differences(policies),
        "rollouts": spent["rollouts"],
        "tokens": {name: spent[name] for name in ("prompt", "cached", "generated")},
        "engine": {"evaluate": spent},  # episodes and held-out turns; not out-of-domain questions and drift
        "seconds": time.monotonic() - started,
    }
    write_json(run_dir / "evaluate" / "summary.json", summary)
    if keeps_books():
        measured.path.unlink(missing_ok=True)
    return summary
