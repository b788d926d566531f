"""`pivotrl profile`: turns/turns.jsonl -> profile/{rollouts,turns,skipped}.jsonl and summary.json."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from pivotrl.config import Config
from pivotrl.errors import UserError
from pivotrl.io import keeps_books, read_json, read_jsonl, write_json, write_jsonl
from pivotrl.local_rollouts import LocalRoller, State, duplicate_prompts, prompt_cache, states_of
from pivotrl.peers import wait_for_peers
from pivotrl.profiling.adaptive import Plan, judge, make_plan
from pivotrl.profiling.evidence import State as Counts
from pivotrl.profiling.evidence import learn, of_histogram
from pivotrl.profiling.fingerprint import fingerprint, weights_digest
from pivotrl.profiling.ledger import Cost, CostLog, CountLog
from pivotrl.profiling.profiler import (
    GetRoller,
    adaptive_sizes,
    calibration_draw,
    draw_turns,
    profile_in_rounds,
    profile_states,
    stopped_at,
    waves,
)
from pivotrl.profiling.recorded import profile_from_rows
from pivotrl.profiling.shards import Shard, check_shards, find_shards, join_files, parse_shard, turns_of
from pivotrl.profiling.statistics import turn_row
from pivotrl.profiling.store import RolloutStore
from pivotrl.setup import Workbench
from pivotrl.tracking.progress import progress
from pivotrl.trajectories.schema import Turn
from pivotrl.trajectories.turn_lines import turns_in


def read_turns(run_dir: Path, split: str) -> list[Turn]:
    """Turns of one split, as `pivotrl turns` wrote them; those of a trajectory share their messages.

    Raises UserError when that stage has not run.
    """
    path = run_dir / "turns" / "turns.jsonl"
    if not path.exists():
        raise UserError(f"{path} does not exist: run `pivotrl turns run_dir={run_dir} trajectories.path=FILE` first")
    return list(turns_in(path, split))


def present_fingerprint(bench: Workbench, turns: list[Turn]) -> dict[str, Any]:
    """What a profile made now would depend on."""
    return fingerprint(
        weights=weights_digest(bench.start_policy),
        template=bench.renderer.fingerprint(),
        sampling=asdict(bench.sampling),
        verifier=(bench.verifier.name, bench.verifier.version, bench.verifier.config()),
        turns=(t.to_json() for t in turns),
    )


def _set_aside_foreign(directory: Path, record: dict[str, Any], cfg: Config) -> None:
    """Keep the rollouts of an interrupted profile of equal settings in place; rename those of any other."""
    if not keeps_books():
        return
    marker = directory / "fingerprint.json"
    wanted = {**record, "rollouts_per_turn": cfg.profile.rollouts_per_turn}
    if cfg.profile.adaptive.enabled:
        wanted["adaptive"] = asdict(cfg.profile.adaptive)
    names = ("rollouts", "second", "cost", "verifier")
    present = [n for n in names if (directory / f"{n}.jsonl").exists()]
    if present and (not marker.exists() or read_json(marker) != wanted):
        number = next(n for n in range(1, 10_000) if not any(directory.glob(f"*.old-{n}.jsonl")))
        for name in present:
            (directory / f"{name}.jsonl").rename(directory / f"{name}.old-{number}.jsonl")
        print(f"profile: the rollouts in {directory} are of another policy or setting; kept as *.old-{number}.jsonl")
    write_json(marker, wanted)


def run_profile(cfg: Config, run_dir: Path) -> dict[str, Any]:
    """Profile the train split, or one shard of it, with the start policy; or merge shards (`profile.shard=merge`); or
    take the pass rates that the rows carry (`profile.from_rows`).

    Interrupted at any instant, it continues where it stopped. Raises UserError when no turn can be profiled, after
    writing the audit file, and for shards that do not make one profile.
    """
    shard = parse_shard(cfg.profile.shard)
    if shard == "merge":
        return merge(run_dir / "profile")
    if cfg.profile.from_rows:
        return profile_from_rows(cfg, run_dir)
    started = time.monotonic()
    directory = run_dir / "profile" / (shard.folder if isinstance(shard, Shard) else "")
    bench = Workbench.build(cfg, run_dir)
    turns = draw_turns(read_turns(run_dir, "train"), cfg.profile.max_turns, cfg.seed)
    record = present_fingerprint(bench, turns)  # of all turns, in every shard
    mine = turns_of(turns, shard) if isinstance(shard, Shard) else turns
    copies: set[str] = set()
    if cfg.trajectories.deduplicate:
        copies = duplicate_prompts(turns, bench.renderer, cfg.rendering.workers, prompt_cache(cfg, run_dir))
    states, skipped = states_of(mine, cfg, run_dir, bench.renderer, bench.verifier, copies)
    write_jsonl(directory / "skipped.jsonl", (asdict(s) for s in skipped))
    reasons = dict(Counter(s.reason for s in skipped))
    if not states and shard is None:
        raise _nothing(len(turns), reasons, directory)
    _set_aside_foreign(directory, record, cfg)
    wait_for_peers()  # all see the same rollouts of an interrupted profile, or none
    with ExitStack() as stack:

        @cache
        def get_roller() -> LocalRoller:
            return LocalRoller(stack.enter_context(bench.engine()), bench.renderer, bench.verifier, bench.sampling)

        result = profile_into(directory, states, cfg, get_roller)
    result |= {"skipped": reasons, "drawn": len(turns), "fingerprint": record, "seconds": time.monotonic() - started}
    write_json(directory / "summary.json", result)
    return result


def _nothing(turns: int, reasons: dict[str, int], directory: Path) -> UserError:
    return UserError(
        f"none of {turns} turns of the train split can be profiled: {reasons}; "
        f"see {directory / 'skipped.jsonl'}.\nFor beyond_context raise model.context_length; "
        "for demonstration_* choose another verifier or its options."
    )


def profile_into(
    directory: Path, states: Sequence[State], cfg: Config, get_roller: GetRoller, bars: bool = True
) -> dict[str, Any]:
    """Make (or complete) rollouts of `states` and their statistics in `directory`; returns the summary's figures.

    `bars=False` where another progress bar is on the screen.
    """
    profile, adaptive = cfg.profile, cfg.profile.adaptive
    k, in_flight = profile.rollouts_per_turn, 4 * cfg.generation.max_sequences
    log, counts = CostLog(directory / "cost.jsonl"), CountLog(directory / "verifier.jsonl")
    told: dict[str, Any] = {}
    if adaptive.enabled:
        store, told["adaptive"] = _adaptive(directory, states, cfg, get_roller, log, counts, bars)
    else:
        store = RolloutStore(directory / "rollouts.jsonl", k)
        with progress(len(states), "profile", done=len(store), enabled=bars) as bar:

            def advance(chunk: Sequence[State], cost: Cost) -> None:
                log.add("profile", cost)
                counts.add(get_roller().verifier)
                bar.advance(len(chunk))

            profile_states(states, get_roller, store, k, max(1, in_flight // k), cfg.seed, advance)
    tally = Tally()
    write_jsonl(directory / "turns.jsonl", _rows(states, store, tally))
    store.close()
    if profile.second_rollouts:
        _second(directory, states, cfg, get_roller, log, counts)
    if adaptive.enabled and tally.turns:
        told["adaptive"] |= tally.of_all_k(k)
    engine = {name: cost.to_json() for name, cost in log.totals().items()}
    return {**tally.summary(), **told, "engine": engine, "verifier": counts.totals()}


def _adaptive(
    directory: Path,
    states: Sequence[State],
    cfg: Config,
    get_roller: GetRoller,
    log: CostLog,
    counts: CountLog,
    bars: bool,
) -> tuple[RolloutStore, dict[str, Any]]:
    """Calibration turns first (unless a histogram is given), then waves of the others in rounds for the undecided.

    The plan of a wave is learnt from all turns before it, whatever was interrupted; with a histogram, from that alone.
    """
    a, k, in_flight = cfg.profile.adaptive, cfg.profile.rollouts_per_turn, 4 * cfg.generation.max_sequences
    full = [] if a.histogram else calibration_draw(states, a.calibration_turns, cfg.seed)
    full_ids = {s.turn.id for s in full}
    store = RolloutStore(directory / "rollouts.jsonl", adaptive_sizes(full_ids, k, a.round))
    done = sum(map(store.count, store))
    parts: list[tuple[int, Plan | None]] = [(len(full), None)] if full else []
    with progress(len(states) * k, "profile", done=done, unit="rollout", enabled=bars) as bar:

        def advance(chunk: Sequence[State], cost: Cost) -> None:
            log.add("profile", cost)
            counts.add(get_roller().verifier)
            bar.advance(cost.rollouts)

        profile_states(full, get_roller, store, k, max(1, in_flight // k), cfg.seed, advance)
        seen = stopped_at(full, store)
        for wave in waves([s for s in states if s.turn.id not in full_ids], len(full), cfg.seed):
            learnt = learn(of_histogram(a.histogram) if a.histogram else seen, k)
            plan = make_plan(learnt, a.round, a.lambda_diff, a.error, parts, len(wave))
            profile_in_rounds(wave, get_roller, store, plan, max(1, in_flight // a.round), cfg.seed, advance)
            parts.append((len(wave), plan))
            if not a.histogram:
                seen += stopped_at(wave, store)
    learnt = learnt if a.histogram else learn(seen, k)
    found = judge(learnt, a.lambda_diff, [part for part in parts if part[0]] or [(1, plan)])
    return store, {
        # Turns with 0, 1, ... K right of K: so many turns with all K rollouts would tell as much as these do.
        "histogram": list(a.histogram) or [round(p * found.evidence_turns, 3) for p in learnt.final],
        "agreement_bound": found.agreement_bound,
        **{f"expected_{name}": getattr(found, name) for name in ("rollouts", "error", "lost", "foreign", "agreement")},
    }


def _second(
    directory: Path, states: Sequence[State], cfg: Config, get_roller: GetRoller, log: CostLog, counts: CountLog
) -> None:
    """An independent profile of the mixed turns. Whatever `select` keeps of them, its means here are unbiased."""
    wait_for_peers()
    mixed = {row["turn_id"] for row in read_jsonl(directory / "turns.jsonl") if row["variance"]}
    chosen = [s for s in states if s.turn.id in mixed]
    n = cfg.profile.second_rollouts
    store = RolloutStore(directory / "second.jsonl", n)
    with progress(len(chosen), "profile, second", done=len(store)) as bar:

        def advance(chunk: Sequence[State], cost: Cost) -> None:
            log.add("second", cost)
            counts.add(get_roller().verifier)
            bar.advance(len(chunk))

        per_chunk = max(1, 4 * cfg.generation.max_sequences // n)
        profile_states(chosen, get_roller, store, n, per_chunk, cfg.seed, advance, purpose="second profile")
    write_jsonl(directory / "second_turns.jsonl", _rows(chosen, store, Tally()))
    store.close()


def _rows(states: Sequence[State], store: RolloutStore, tally: Tally) -> Iterator[dict[str, Any]]:
    """One row a turn; one turn's rollouts are in memory at a time."""
    for state in states:
        rollouts = store.rows(state.turn.id)
        row = turn_row(state.turn, rollouts)
        tally.add(row)
        tally.verdicts.update(r["reason"] for r in rollouts)
        tokens = (row["n"] * row["prompt_tokens"], sum(r["cached_prompt_tokens"] for r in rollouts))
        tally.cost += Cost(row["n"], *tokens, row["generated_tokens"])
        yield row


class Tally:
    """Figures of the summary, summed over turns: of a whole profile, a shard, or all shards of a merge."""

    def __init__(self) -> None:
        self.turns = self.mixed = 0
        self.mean_sum = 0.0
        self.verdicts: Counter[str] = Counter()
        self.cost = Cost()
        self.seen: Counter[Counts] = Counter()  # turns of binary rewards alone by (rollouts, right)

    def add(self, row: dict[str, Any]) -> None:
        self.turns += 1
        if row["right"] + row["wrong"] == row["n"]:
            self.seen[row["n"], row["right"]] += 1
        self.mixed += bool(row["variance"])
        self.mean_sum += row["mean"] or 0.0

    def summary(self) -> dict[str, Any]:
        return {
            "turns": self.turns,
            "rollouts": self.cost.rollouts,
            "mean_reward": self.mean_sum / self.turns if self.turns else 0.0,
            "mixed": self.mixed,
            "uninformative_share": 1 - self.mixed / self.turns if self.turns else 0.0,
            "verdicts": dict(self.verdicts.most_common()),
            "tokens": {"prompt": self.cost.prompt, "cached": self.cost.cached, "generated": self.cost.generated},
        }

    def of_all_k(self, k: int) -> dict[str, float]:
        """What an adaptive profile saved, and what all K rollouts would have shown: stopped turns look more certain
        than they are, so that the shares and means of what was sampled are biased."""
        learnt = learn(self.seen, k)
        return {
            "saved_share": 1 - self.cost.rollouts / (k * self.turns),
            "uninformative_share_of_all_k": learnt.final[0] + learnt.final[-1],
            "mean_reward_of_all_k": learnt.mean([j / k for j in range(k + 1)]),
        }


def merge(directory: Path) -> dict[str, Any]:
    """Join a complete set of shards into the profile that one job would have made.

    Raises UserError for missing, unfinished, foreign or overlapping shards; nothing is written then.
    """
    started = time.monotonic()
    paths = find_shards(directory)
    check_shards(paths)
    join_files(paths, directory)
    write_json(directory / "fingerprint.json", read_json(paths[0] / "fingerprint.json"))
    summaries = [read_json(path / "summary.json") for path in paths]
    tally, reasons = Tally(), Counter[str]()
    for row in read_jsonl(directory / "turns.jsonl"):
        tally.add(row)
    for part in summaries:
        tally.verdicts.update(part["verdicts"])
        tally.cost += Cost(part["rollouts"], **part["tokens"])
        reasons.update(part["skipped"])
    if not tally.turns:
        raise _nothing(summaries[0]["drawn"], dict(reasons), directory)
    result = tally.summary()
    if "adaptive" in summaries[0]:
        k = read_json(directory / "fingerprint.json")["rollouts_per_turn"]
        result["adaptive"] = summaries[0]["adaptive"] | tally.of_all_k(k)
    totals = CostLog(directory / "cost.jsonl").totals()
    result |= {
        "engine": {name: cost.to_json() for name, cost in totals.items()},
        "verifier": CountLog(directory / "verifier.jsonl").totals(),
        "skipped": dict(reasons),
        "drawn": summaries[0]["drawn"],
        "fingerprint": summaries[0]["fingerprint"],
        # What the shards took, one after the other; they may have run side by side.
        "seconds": sum(part["seconds"] for part in summaries) + time.monotonic() - started,
    }
    write_json(directory / "summary.json", result)
    return result
