"""`pivotrl profile`: turns/turns.jsonl -> profile/{rollouts,turns,skipped}.jsonl and summary.json."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.io import read_json, read_jsonl, write_json, write_jsonl
from pivotrl.local_rollouts import LocalRoller, State, render_states
from pivotrl.profiling.fingerprint import fingerprint, weights_digest
from pivotrl.profiling.profiler import draw_turns, profile_states
from pivotrl.profiling.statistics import turn_row
from pivotrl.profiling.store import RolloutStore
from pivotrl.setup import Workbench
from pivotrl.tracking.progress import progress
from pivotrl.trajectories.schema import Turn


def read_turns(run_dir: Path, split: str) -> list[Turn]:
    """Turns of one split, as `pivotrl turns` wrote them. Raises UserError when that stage has not run."""
    path = run_dir / "turns" / "turns.jsonl"
    if not path.exists():
        raise UserError(f"{path} does not exist: run `pivotrl turns run_dir={run_dir} trajectories.path=FILE` first")
    return [turn for row in read_jsonl(path) if (turn := Turn.from_json(row)).split == split]


def present_fingerprint(bench: Workbench, turns: list[Turn]) -> dict[str, Any]:
    """What a profile made now would depend on."""
    return fingerprint(
        weights=weights_digest(bench.start_policy),
        template=bench.renderer.fingerprint(),
        sampling=asdict(bench.sampling),
        verifier=(bench.verifier.name, bench.verifier.version, bench.verifier.config()),
        turns=(t.to_json() for t in turns),
    )


def _open_store(directory: Path, record: dict[str, Any], rollouts_per_turn: int) -> RolloutStore:
    """Continue the rollouts of an interrupted profile of equal fingerprint; set aside those of any other."""
    path, marker = directory / "rollouts.jsonl", directory / "fingerprint.json"
    wanted = {**record, "rollouts_per_turn": rollouts_per_turn}
    if path.exists() and (not marker.exists() or read_json(marker) != wanted):
        number = next(n for n in range(1, 10_000) if not (directory / f"rollouts.old-{n}.jsonl").exists())
        path.rename(directory / f"rollouts.old-{number}.jsonl")
        print(f"profile: the rollouts in {path} are of another policy or setting; kept as rollouts.old-{number}.jsonl")
    write_json(marker, wanted)
    return RolloutStore(path, rollouts_per_turn)


def run_profile(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Profile the train split with the start policy. Interrupted at any instant, it continues where it stopped.

    Raises UserError when no turn can be profiled, after writing the audit file.
    """
    started = time.monotonic()
    directory = run_dir / "profile"
    bench = Workbench.build(cfg, run_dir)
    turns = draw_turns(read_turns(run_dir, "train"), cfg.profile.max_turns, cfg.seed)
    states, skipped = render_states(
        turns, bench.renderer, bench.verifier, cfg.model.context_length, cfg.sampling.max_new_tokens
    )
    write_jsonl(directory / "skipped.jsonl", (asdict(s) for s in skipped))
    reasons = dict(Counter(s.reason for s in skipped))
    if not states:
        raise UserError(
            f"none of {len(turns)} turns of the train split can be profiled: {reasons}; "
            f"see {directory / 'skipped.jsonl'}.\nFor beyond_context raise model.context_length; "
            "for demonstration_* choose another verifier or its options."
        )
    k = cfg.profile.rollouts_per_turn
    record = present_fingerprint(bench, turns)
    store = _open_store(directory, record, k)
    if len(store.groups) < len(states):
        with bench.engine() as engine, progress(len(states), "profile") as bar:
            bar.advance(len(store.groups))
            roller = LocalRoller(engine, bench.renderer, bench.verifier, bench.sampling)
            chunk = max(1, 4 * cfg.generation.max_sequences // k)
            profile_states(states, roller, store, k, chunk, cfg.seed, lambda n: bar.advance(n))
    store.close()
    return _finish(directory, states, store, record, reasons, time.monotonic() - started)


def _finish(
    directory: Path,
    states: list[State],
    store: RolloutStore,
    record: dict[str, Any],
    reasons: dict[str, int],
    seconds: float,
) -> dict[str, Any]:
    rows = [turn_row(s.turn, store.groups[s.turn.id]) for s in states]
    write_jsonl(directory / "turns.jsonl", rows)
    rollouts = [r for s in states for r in store.groups[s.turn.id]]
    mixed = sum(bool(row["variance"]) for row in rows)
    summary = {
        "turns": len(rows),
        "skipped": reasons,
        "rollouts": len(rollouts),
        "mean_reward": sum(row["mean"] or 0.0 for row in rows) / len(rows),
        "mixed": mixed,
        "uninformative_share": 1 - mixed / len(rows),
        "verdicts": dict(Counter(r.verdict.reason for r in rollouts).most_common()),
        "tokens": {
            "prompt": sum(r.prompt_tokens for r in rollouts),
            "cached": sum(r.completion.cached_prompt_tokens for r in rollouts),
            "generated": sum(len(r.completion.token_ids) for r in rollouts),
        },
        "seconds": seconds,
        "fingerprint": record,
    }
    write_json(directory / "summary.json", summary)
    return summary
