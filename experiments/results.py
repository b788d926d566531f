"""`python -m experiments.results` (`make results`): docs/results.md and its figures, from the recorded runs."""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from experiments import aggregate as stats
from experiments import figures
from experiments.aggregate import Estimate, Row
from experiments.arms import ARMS, MAIN, SWEEPS
from pivotrl.errors import UserError
from pivotrl.io import read_json
from pivotrl.tracking.progress import duration

Arms = dict[str, list[Row]]  # arm -> its records, by seed
# whose rollouts to equal success are compared
EQUAL_SUCCESS = tuple((name, "e2e") for name in ("adv", "adv_reprofiled", "adv_long", "mixed", "cand"))


def read_records(folder: Path) -> dict[str, dict[str, Arms]]:
    """experiment -> split -> arm -> records. Raises UserError when there is none."""
    found: dict[str, dict[str, Arms]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    for path in sorted(folder.glob("*.json")):
        record = read_json(path)
        if "arm" not in record or record["arm"] not in ARMS:
            raise UserError(f"{path}: no record of an arm of the study")
        found[record["experiment"]][record["split"]][record["arm"]].append({**record, "file": path.name})
    if not found:
        raise UserError(f"{folder} has no record; run `python -m experiments.study` first")
    for splits in found.values():
        _check_comparable([r for arms in splits.values() for records in arms.values() for r in records])
        for arms in splits.values():
            for records in arms.values():
                records.sort(key=lambda r: r["seed"])
    return {name: {split: dict(arms) for split, arms in splits.items()} for name, splits in found.items()}


def _check_comparable(records: Sequence[Row]) -> None:
    """An experiment's records are of one version of its environment, those of a seed (run at any time) of one pi_0."""
    of_seed: dict[int, Row] = {}
    for record in records:
        first, same_seed = records[0], of_seed.setdefault(record["seed"], record)
        if record["environment"] != first["environment"]:
            raise UserError(
                f"{record['file']} was judged by {record['environment']}, {first['file']} by "
                f"{first['environment']}: evaluate one of them again, or remove its record"
            )
        if record["start_policy"] != same_seed["start_policy"]:
            raise UserError(
                f"{record['file']} starts from another policy than {same_seed['file']} of the same seed: run one of "
                "them again from the other's folder <seed>/shared, or remove its record"
            )


def write_results(records: Path, page: Path) -> str:
    """Write the page and its figures (beside the records); returns the page's text."""
    parts = [
        "# Results",
        "Made by `make results` from the records in `docs/results/`; each record names the run directory that it was "
        "taken from. Intervals are 95 %: seeds are drawn with replacement, and tasks within them; differences are "
        "paired by seed and task. Budgets count the rollouts of the profile wherever an arm's pivots need one.",
    ]
    for experiment, splits in sorted(read_records(records).items()):
        for split, arms in sorted(splits.items()):
            parts += _section(experiment, split, arms, records, page)
    text = "\n\n".join(parts) + "\n"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    return text


def _section(experiment: str, split: str, arms: Arms, folder: Path, page: Path) -> list[str]:
    seeds = sorted({r["seed"] for rows in arms.values() for r in rows})
    parts = [f"## {experiment}, {split} tasks", f"Seeds: {', '.join(map(str, seeds))}."]
    main, sweeps = ([n for n in group if n in arms] for group in (MAIN, SWEEPS))
    compared = main != ["adv"] or not sweeps  # else adv is here only beside its own sweep
    if compared:
        parts += ["### In the domain", _in_domain(arms, main)]
        if "adv" in main and len(main) > 1:
            parts += ["### Against PivotRL on the same seeds and tasks", _against(arms, main, "adv")]
        parts += ["### Where it succeeds, and how it fails", _by_family(arms, main)]
        if any(r["policy"].get("ood") for rows in arms.values() for r in rows):
            parts += ["### Outside it", _out_of_domain(arms, main)]
    if "adv" in main and sweeps:
        parts += ["### One setting changed", _in_domain(arms, ["adv", *sweeps], "adv")]
    if text := _watched(arms):
        parts += ["### While training", text]
    if compared:
        parts += _costs_and_signal(arms)
        parts += _figures(experiment if split == "test" else f"{experiment}-{split}", arms, folder, page)
    return [*parts, "### Records", _records(arms)]


def _costs_and_signal(arms: Arms) -> list[str]:
    equal = [text for pair in EQUAL_SUCCESS if (text := _equal_success(arms, *pair))]
    parts = ["### Rollouts to equal success", *equal] if equal else []
    if text := _gamma(arms):
        parts += ["### Signal of the sets before training", text]
    return parts


def _figures(stem: str, arms: Arms, folder: Path, page: Path) -> list[str]:
    """Write the figures to `folder`; returns the page's references to them."""
    parts = []
    for name, title, svg in figures.all_figures(arms):
        if svg:
            path = folder / f"{stem}-{name}.svg"
            path.write_text(figures.standalone(svg), encoding="utf-8")
            place = path.relative_to(page.parent) if path.is_relative_to(page.parent) else path
            parts.append(f"![{title}]({place})\n\n{title}.")
    return parts


def _in_domain(arms: Arms, names: Sequence[str], reference: str = "sft") -> str:
    against = f"against {ARMS[reference].title}"
    head = ["arm", "seeds", "greedy", against, "sampled", against, "pass@k", "valid calls", "rollout turns", "time"]
    rows = []
    for name in names:
        records = arms[name]
        success = []
        for mode in ("greedy", "sampled"):
            found = stats.estimate(stats.per_task(records, mode))
            success += [_share(found), _change(arms, name, reference, mode)]
        rollouts = [stats.budget(r, "rollouts") for r in records]
        seconds = [stats.budget(r, "seconds") for r in records]
        rows.append(
            [
                ARMS[name].title,
                _seeds(records),
                *success,
                _pass_at(records),
                _percent(stats.mean_of(records, "policy", "greedy", "tool_calls", "share")),
                f"{sum(rollouts) / len(rollouts):.0f}",
                duration(sum(seconds) / len(seconds)),
            ]
        )
    return table(head, rows)


def _against(arms: Arms, names: Sequence[str], reference: str) -> str:
    """Paired differences to one arm, which is what an ablation asks; only seeds that both have."""
    of_reference = {r["seed"] for r in arms[reference]}
    rows = []
    for name in (n for n in names if n != reference):
        if shared := [r for r in arms[name] if r["seed"] in of_reference]:
            changes = [_change(arms, name, reference, mode) for mode in ("greedy", "sampled", "ood")]
            rows.append([ARMS[name].title, _seeds(shared), *changes])
    return table(["arm", "seeds", "greedy", "sampled", "outside the domain"], rows)


def _change(arms: Arms, name: str, reference: str, mode: str) -> str:
    """The paired difference of two arms, on the seeds and tasks that both have."""
    if name == reference:
        return _points(None)
    ours, theirs = (stats.per_task(arms.get(arm, []), mode) for arm in (name, reference))
    return _points(stats.paired(ours, theirs))


def _seeds(records: Sequence[Row]) -> str:
    """Which ones: start policies of different seeds differ, so that only arms of the same seeds compare as they are."""
    return ", ".join(str(r["seed"]) for r in records)


def _by_family(arms: Arms, names: Sequence[str]) -> str:
    """Greedy success by family of tasks, and the most frequent ways to fail."""
    greedy = {name: [r["policy"]["greedy"] for r in arms[name]] for name in names}
    families = sorted({family for rows in greedy.values() for row in rows for family in row.get("by_family", {})})
    rows = []
    for name, found in greedy.items():
        shares = [_percent(stats.mean_of(found, "by_family", family)) for family in families]
        failures: Counter[str] = Counter()
        for row in found:
            failures.update({k: v for k, v in row.get("reasons", {}).items() if k != "ok"})
        tasks = sum(row["n"] * row.get("trials", 1) for row in found)
        often = ", ".join(f"{reason} {_percent(count / tasks)}" for reason, count in failures.most_common(3))
        rows.append([ARMS[name].title, *shares, often or "–"])
    return table(["arm", *families, "fails most by"], rows)


def _pass_at(records: Sequence[Row]) -> str:
    largest = max(
        (int(k) for r in records for k in (r["policy"].get("sampled") or {}).get("pass_at", {})),
        default=0,
    )
    value = stats.mean_of(records, "policy", "sampled", "pass_at", str(largest))
    return "–" if value is None else f"{100 * value:.1f} % (k={largest})"


def _out_of_domain(arms: Arms, names: Sequence[str]) -> str:
    sets = sorted({s for rows in arms.values() for r in rows for s in (r["policy"].get("ood") or {}).get("sets", {})})
    head = ["arm", "accuracy", "against base", *sets, "KL, unrelated", "KL, in domain", "order kept (choices)"]
    head += ["order kept (accepted)", "order kept (rejected)"]
    rows = []
    for name in names:
        records = arms[name]
        found = stats.estimate(stats.per_task(records, "ood"))
        row = [ARMS[name].title, _share(found), _change(arms, name, "base", "ood")]
        row += [_percent(stats.mean_of(records, "policy", "ood", "sets", s, "accuracy")) for s in sets]
        for kind in ("kl_unrelated", "kl_in_domain"):
            value = stats.mean_of(records, "policy", "drift", kind, "kl")
            row.append("–" if value is None else f"{value:.4f}")
        for kind in ("order_choices", "order_accepted", "order_rejected"):
            row.append(_percent(stats.mean_of(records, "policy", "drift", kind, "share")))
        rows.append(row)
    return table(head, rows)


def _watched(arms: Arms) -> str:
    """Success on the watched tasks at the start, at the best look and at the last: does an arm hold what it reached?

    The best of several looks flatters: each has an error of its own.
    """
    rows = []
    for name in (n for n in (*MAIN, *SWEEPS) if n in arms):
        looked = {r["seed"]: [p for p in r.get("curve", []) if p["success"] is not None] for r in arms[name]}
        if not (looked := {seed: points for seed, points in looked.items() if points}):
            continue
        curves = list(looked.values())
        best = [max(points, key=lambda point: point["success"]) for points in curves]
        looks = ([points[0] for points in curves], best, [points[-1] for points in curves])
        means = [sum(point["success"] for point in look) / len(look) for look in looks]
        steps = ", ".join(str(point["step"]) for point in best)
        rows.append([ARMS[name].title, ", ".join(map(str, looked)), *map(_percent, means), steps])
    head = ["arm", "seeds", "watched success, start", "best look", "last look", "step of the best, by seed"]
    return table(head, rows) if rows else ""


def _equal_success(arms: Arms, pivot: str, reference: str) -> str:
    """Rollout turns and seconds at which each curve, over the seeds of both, first reaches levels that both reach."""
    both = {r["seed"] for r in arms.get(pivot, [])} & {r["seed"] for r in arms.get(reference, [])}
    records = {name: [r for r in arms[name] if r["seed"] in both] for name in (pivot, reference) if both}
    curves = {name: stats.smooth(stats.curve(rows, "rollouts"), 2) for name, rows in records.items()}
    times = {name: stats.smooth(stats.curve(rows, "seconds"), 2) for name, rows in records.items()}
    if not both or not all(curves.values()):
        return ""
    start = max(points[0][1] for points in curves.values())
    best = {name: max(y for _, y in points) for name, points in curves.items()}
    text = (
        f"Seeds {', '.join(map(str, sorted(both)))}; highest success of the curves (two looks averaged): "
        f"{ARMS[pivot].title} {_percent(best[pivot])}, "
        f"{ARMS[reference].title} {_percent(best[reference])}; start {_percent(start)}."
    )
    rows = []
    for share in (0.5, 0.75, 1.0):
        level = start + share * (min(best.values()) - start)
        cells = [_percent(level)]
        for points in (curves, times):
            ours, theirs = stats.reaches(points[pivot], level), stats.reaches(points[reference], level)
            ratio = f"{theirs / ours:.1f}" if ours and theirs else "–"
            cells += ["–" if v is None else f"{v:.0f}" for v in (ours, theirs)] + [ratio]
        rows.append(cells)
    head = ["success", f"turns, {pivot}", f"turns, {reference}", "ratio", f"s, {pivot}", f"s, {reference}", "ratio"]
    if min(best.values()) <= start:
        return f"{text} One of them never rises above the start, so there is no common level to compare at."
    return f"{text}\n\n{table(head, rows)}"


def _gamma(arms: Arms) -> str:
    """Deviation of the reward and gamma at beta = 1, by set, from the profiles of all seeds."""
    counts: dict[str, int] = defaultdict(int)
    seen: set[int] = set()
    for record in (r for name, rows in arms.items() if not ARMS[name].own_profile for r in rows):
        if record["seed"] not in seen:
            seen.add(record["seed"])
            for key, count in record["profile"]["right_of_scored"].items():
                counts[key] += count
    if not counts:
        return ""
    lambda_diff = next((r["select"]["lambda_diff"] for r in arms.get("adv", []) if "select" in r), 0.6)
    rows = []
    for name in ("cand", "mixed", "adv"):
        std, value, turns = stats.gamma(counts, name, lambda_diff, 1.0)
        rows.append([name, str(turns), f"{std:.3f}", f"{value:.3f}"])
    return table(["set", "turns", "std of the reward", "gamma at beta 1"], rows)


def _records(arms: Arms) -> str:
    rows = [[f"`{r['file']}`", f"`{r['run_dir']}`", r["version"]] for rows in arms.values() for r in rows]
    return table(["record", "run directory", "version"], rows)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _share(found: Estimate | None) -> str:
    return "–" if found is None else f"{100 * found.mean:.1f} % [{100 * found.low:.1f}, {100 * found.high:.1f}]"


def _points(found: Estimate | None) -> str:
    return "–" if found is None else f"{100 * found.mean:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.results", description=__doc__)
    parser.add_argument("--records", type=Path, default=Path("docs/results"))
    parser.add_argument("--page", type=Path, default=Path("docs/results.md"))
    args = parser.parse_args(arguments)
    try:
        write_results(args.records, args.page)
    except UserError as error:
        print(f"results: {error}", file=sys.stderr)
        return 2
    print(f"results: {args.page}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
