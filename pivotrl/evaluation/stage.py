"""`pivotrl evaluate`: policies side by side, in one engine that is refitted from each checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from pivotrl.config import Config
from pivotrl.environments.registry import get_environment
from pivotrl.errors import UserError
from pivotrl.evaluation.benchmark import run_benchmark
from pivotrl.evaluation.drift_probe import DriftProbe
from pivotrl.evaluation.in_domain import EngineActor, evaluate_turns, play
from pivotrl.evaluation.out_of_domain import evaluate_sets
from pivotrl.evaluation.questions import read_sets
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


class Evaluator:
    """The measurements of one policy; the engine holds its weights."""

    def __init__(self, cfg: Config, run_dir: Path, bench: Workbench, engine: Engine):
        self.cfg, self.run_dir, self.bench, self.engine = cfg, run_dir, bench, engine
        self.episodes = run_dir / "evaluate" / "episodes.jsonl"
        self.progress = run_dir / "evaluate" / "measured.json"
        self.policies: dict[str, Any] = {}
        self.cost: dict[str, float] = Cost().to_json()
        self._continue()
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

    def _continue(self) -> None:
        """Take over what an interrupted evaluation had measured: whole policies; a half-measured one is done again."""
        if self.progress.is_file():
            before = read_json(self.progress)
            self.policies, self.cost = before["policies"], self.cost | before["cost"]
        if self.episodes.is_file():
            write_jsonl(self.episodes, (row for row in whole_rows(self.episodes) if row["policy"] in self.policies))

    def keep(self, policy: str, measured: dict[str, Any]) -> None:
        """Note a policy as measured, so that an interruption does not cost it."""
        self.policies[policy] = measured
        write_json(self.progress, {"policies": self.policies, "cost": self.cost})
        kept()

    def modes(self) -> dict[str, tuple[Sampling, int]]:
        greedy = replace(self.bench.sampling, temperature=0.0)
        wanted = {"greedy": (greedy, 1)}
        if self.cfg.evaluate.trials:
            wanted["sampled"] = (self.bench.sampling, self.cfg.evaluate.trials)
        return wanted

    @property
    def parts(self) -> int:
        """How often `measure` tells that a part is done."""
        return len(self.modes()) + len(self.sets) + (self.drift is not None)

    def measure(self, policy: str, tell: Callable[[str], None]) -> dict[str, Any]:
        """In-domain success in every mode, and out-of-domain accuracy, of the policy that the engine holds.

        `tell` is called after each part, with what it showed.
        """
        result = {}
        for mode, (sampling, trials) in self.modes().items():
            result[mode] = self._in_domain(sampling, trials, {"policy": policy, "mode": mode})
            tell(f"{policy} {mode} {_short(result[mode]['success'])}")
        if self.sets:
            length, new = self.cfg.model.context_length, self.cfg.evaluate.ood_max_new_tokens
            result["ood"] = evaluate_sets(
                self.sets, self.engine, self.bench.renderer, new, length, lambda name: tell(f"{policy} {name}")
            )
        if self.drift is not None:
            result["drift"] = self.drift.measure()
            tell(f"{policy} drift")
        return result

    def _in_domain(self, sampling: Sampling, trials: int, label: dict[str, str]) -> dict[str, Any]:
        cfg, bench = self.cfg, self.bench
        if self.environment is None:
            roller = LocalRoller(self.engine, bench.renderer, bench.verifier, sampling)
            found = evaluate_turns(self.states, roller, trials, cfg.seed)
            self._spend(found.pop("cost"))
            return found
        tasks = evaluation_tasks(cfg, self.run_dir, self.environment, cfg.evaluate.split, cfg.evaluate.tasks)
        actor = EngineActor(self.engine, bench.renderer, sampling, cfg.model.context_length, cfg.seed)
        found, rows = play(self.environment, tasks, trials, cfg.environment.max_turns, actor)
        append_jsonl(self.episodes, ({**label, **row} for row in rows))
        self._spend(actor.cost)
        return found

    def _spend(self, cost: dict[str, float]) -> None:
        for name, value in cost.items():
            self.cost[name] += value


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


def _short(success: float | None) -> str:
    return "not judged" if success is None else f"{success:.2f}"


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
    with bench.engine() as engine:
        evaluator = Evaluator(cfg, run_dir, bench, engine)
        policies = evaluator.policies
        done = len(policies) * evaluator.parts
        with progress(len(folders) * evaluator.parts, "evaluate", done, "measurement") as bar:
            for version, (policy, folder) in enumerate(folders.items(), 1):
                if policy in policies:
                    continue
                if folder != bench.start_policy:
                    engine.refit(_weights(folder), version=version)
                evaluator.keep(policy, evaluator.measure(policy, lambda note: bar.advance(1, note)))
    cost = evaluator.cost
    summary = {
        "environment": cfg.environment.name,
        "split": cfg.evaluate.split,
        "policies": policies,
        "differences": differences(policies),
        "rollouts": cost["rollouts"],
        "tokens": {name: cost[name] for name in ("prompt", "cached", "generated")},
        "engine": {"evaluate": cost},  # episodes and held-out turns; not out-of-domain questions and drift
        "seconds": time.monotonic() - started,
    }
    write_json(run_dir / "evaluate" / "summary.json", summary)
    if keeps_books():
        evaluator.progress.unlink(missing_ok=True)
    return summary
