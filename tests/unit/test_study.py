"""The study's script and its tables, on runs that a stand-in for `pivotrl run` makes: every file real, no model."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import aggregate as stats
from experiments.arms import ARMS, MAIN, SWEEPS, chosen
from experiments.figures import same_seeds
from experiments.plan import Study
from experiments.record import matched_kl
from experiments.results import main, read_records, write_results
from experiments.study import parse, run_study
from pivotrl.configuration import load_config
from pivotrl.errors import UserError
from pivotrl.io import append_jsonl, read_json, write_json, write_jsonl
from pivotrl.validation import conflicts

LEVEL = {"base": 0.2, "sft": 0.4, "pivotrl": 0.6, "e2e": 0.6}


class FakePivotrl:
    """Writes what the stages would: summaries, metrics, curves."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.fail_at = ""

    def __call__(self, overrides: Sequence[str]) -> int:
        cfg = load_config(overrides)
        run_dir = Path(cfg.run_dir)
        self.calls.append((f"{run_dir.parent.name}/{run_dir.name}", cfg.run.stages))
        if run_dir.name == self.fail_at:
            return 1
        for stage in cfg.run.stages:
            if not (run_dir / stage / "summary.json").exists():
                write_json(run_dir / stage / "summary.json", getattr(self, stage)(cfg, run_dir / stage))
        return 0

    def turns(self, cfg: Any, folder: Path) -> dict[str, Any]:
        return {"turns": 10}

    def warmup(self, cfg: Any, folder: Path) -> dict[str, Any]:
        return {"steps": 4}

    def profile(self, cfg: Any, folder: Path) -> dict[str, Any]:
        rewards = [[0.0] * 8, [1.0] * 8, [0.0] * 6 + [1.0] * 2, [0.0] * 2 + [1.0] * 6]
        write_jsonl(folder / "turns.jsonl", ({"turn_id": str(i), "rewards": r} for i, r in enumerate(rewards)))
        return {"rollouts": 32, "engine": {"profile": {"seconds": 16.0}}, "fingerprint": {"weights": f"pi{cfg.seed}"}}

    def select(self, cfg: Any, folder: Path) -> dict[str, Any]:
        return {"set": cfg.select.set, "lambda_diff": 0.6, "kept": 1, "counts": {"adv": 1}, "turns": 4}

    def _train(self, cfg: Any, folder: Path, rollouts: int) -> dict[str, Any]:
        for step in range(4):
            row = {"step": step, "reward": 0.5, "group_std": 0.4 - 0.1 * step, "mixed_groups": 1.0, "seconds": 2.0}
            if step == 2 and cfg.algorithm.reprofile.every_steps:
                row["reprofile_rollouts"] = 640.0
            append_jsonl(folder / "metrics.jsonl", [row])
        for step in (0, 2, 4):
            row = {"step": step, "rollouts": rollouts * step, "success": 0.2 + 0.1 * step, "n": 8}
            append_jsonl(folder / "curve.jsonl", [{**row, "split": cfg.watch.split}])
        return {"steps": 4, "rollouts": 4 * rollouts, "tokens": {}}

    def train(self, cfg: Any, folder: Path) -> dict[str, Any]:
        return self._train(cfg, folder, 64)

    def e2e(self, cfg: Any, folder: Path) -> dict[str, Any]:
        return self._train(cfg, folder, 320)

    def sft(self, cfg: Any, folder: Path) -> dict[str, Any]:
        append_jsonl(folder / "metrics.jsonl", [{"step": 0, "loss": 1.0, "seconds": 3.0}])
        stop = {"max_kl": cfg.sft.max_kl, "kl_to_start": 0.02, "reached": True} if cfg.sft.max_kl else {}
        return {"steps": 1, "tokens": {"trained": 9}, **stop}

    def evaluate(self, cfg: Any, folder: Path) -> dict[str, Any]:
        assert (folder.parent / "profile" / "summary.json").exists()
        (policy,) = cfg.evaluate.policies
        rng = random.Random(f"{cfg.seed}")
        tasks = {f"t{i}": float(rng.random() < LEVEL[policy]) for i in range(12)}
        row = {"success": 0.5, "per_task": tasks, "tool_calls": {"share": 0.9}, "pass_at": {"1": 0.5, "4": 0.7}}
        row |= {
            "n": 12,
            "trials": 1,
            "by_family": {"cancel": 0.25 + 0.5 * (cfg.seed == 1), "refuse": LEVEL[policy] / 4},
        }
        row |= {"reasons": {"ok": 6, "wrong_order": 3, "told_nobody": 2 + cfg.seed}}
        sets = {"gsm8k": {"accuracy": 0.1}, "hellaswag": {"accuracy": 0.3}}
        drift = {
            "kl_in_domain": {"kl": 0.03},
            "kl_unrelated": {"kl": 0.01},
            "order_choices": {"share": 0.9, "pairs": 9},
        }
        ood = {"accuracy": 0.2, "per_task": {"a": 1.0, "b": 0.0}, "sets": sets}
        return {
            "split": cfg.evaluate.split,
            "environment": "outfitters",
            "environment_version": "1.1",
            "policies": {policy: {"greedy": row, "sampled": row, "ood": ood, "drift": drift}},
        }


@pytest.fixture
def study(tmp_path: Path) -> Study:
    return Study("study_outfitters", tmp_path / "runs", tmp_path / "records", "test", (), FakePivotrl())


def calls(study: Study) -> list[tuple[str, list[str]]]:
    assert isinstance(study.start, FakePivotrl)
    return study.start.calls


@pytest.mark.parametrize(
    ("experiment", "name"),
    [*(("study_outfitters", name) for name in ARMS), ("study_shell", "adv"), ("study_shell", "e2e")],
)
def test_every_arm_is_a_valid_configuration(experiment: str, name: str):
    arm = ARMS[name]
    stages = ",".join((*arm.stages, "evaluate"))
    extra = ["sft.max_kl=0.1"] if arm.matches else []
    cfg = load_config([f"experiment={experiment}", *arm.overrides, *extra, f"run.stages=[{stages}]"])
    assert conflicts(cfg) == []
    assert (cfg.environment.name == "shell_tasks") is (experiment == "study_shell")
    assert cfg.domain.name == cfg.environment.name


def test_arms_have_the_same_budget_of_rollouts_a_step():
    sizes = set()
    for name in ("adv", "naive", "dapo", *(n for n in SWEEPS if "group" in n)):
        a = load_config(["experiment=study_outfitters", *ARMS[name].overrides]).algorithm
        sizes.add((a.steps, a.pivots_per_step * a.group_size))
    assert len(sizes) == 1


def test_arms_share_what_is_made_once_and_are_recorded(study: Study):
    written = run_study(study, chosen(["base", "adv", "sft"]), [0, 1])
    assert [p.name for p in written[:3]] == [f"study_outfitters-{arm}-seed0.json" for arm in ("base", "adv", "sft")]
    assert [folder for folder, _ in calls(study)][:4] == ["seed0/shared", "seed0/base", "seed0/adv", "seed0/sft"]
    assert dict(calls(study))["seed1/adv"] == ["select", "train", "evaluate"]
    assert study.folder(1, "adv").joinpath("profile").resolve() == study.folder(1, "shared") / "profile"
    record = read_json(written[1])
    assert record["run_dir"] == str(study.folder(0, "adv"))
    assert record["curve"][-1] == {
        "step": 4,
        "rollouts": 256,
        "seconds": 8.0,
        "success": pytest.approx(0.6),
        "n": 8,
        "split": "validation",
    }
    assert record["profile"]["right_of_scored"] == {"0/8": 1, "2/8": 1, "6/8": 1, "8/8": 1}


def test_a_seed_that_starts_elsewhere_than_its_records_is_refused_before_its_arms(study: Study):
    (path,) = run_study(study, chosen(["base"]), [1])
    write_json(path, {**read_json(path), "start_policy": "of another machine"})
    before = len(calls(study))
    run_study(study, chosen(["base"]), [10])  # another seed, whose record's name begins alike
    with pytest.raises(UserError, match=r"base-seed1\.json starts from another policy .*same settings.*--records"):
        run_study(study, chosen(["adv"]), [1])
    assert [folder for folder, _ in calls(study)[before:]] == ["seed10/shared", "seed10/base", "seed1/shared"]
    run_study(replace(study, records=study.records / "mine"), chosen(["adv"]), [1])


def test_rollouts_of_a_new_profile_count(study: Study):
    run_study(study, chosen(["adv", "adv_reprofiled"]), [0])
    static, renewed = (read_json(study.records / f"study_outfitters-{a}-seed0.json") for a in ("adv", "adv_reprofiled"))
    assert renewed["training"]["rollouts"] == static["training"]["rollouts"] + 640
    more = [
        ours["rollouts"] - theirs["rollouts"] for ours, theirs in zip(renewed["curve"], static["curve"], strict=True)
    ]
    assert more == [0, 0, 640]


def test_a_stopped_study_goes_on_where_it_was(study: Study):
    assert isinstance(study.start, FakePivotrl)
    study.start.fail_at = "adv"
    with pytest.raises(UserError, match=r"adv: `pivotrl run` ended with exit 1"):
        run_study(study, chosen(["base", "adv"]), [0])
    study.start.fail_at = ""
    assert len(run_study(study, chosen(["base", "adv"]), [0])) == 2
    assert run_study(study, chosen(["base"]), [0], hours=-1.0) == []


def test_the_matched_arm_follows_its_model_and_stops_at_its_kl(study: Study):
    names = [arm.name for arm in chosen(["sft_kl", "base"])]
    assert names == ["adv", "base", "sft_kl"]
    run_study(study, chosen(["sft_kl"]), [0])
    record = read_json(study.records / "study_outfitters-sft_kl-seed0.json")
    assert record["training"]["max_kl"] == 0.03
    assert matched_kl(study.folder(0, "adv")) == 0.03
    with pytest.raises(UserError, match="not evaluated yet"):
        matched_kl(study.folder(7, "adv"))
    with pytest.raises(UserError, match="Did you mean 'adv'"):
        chosen(["adw"])


def test_the_page_has_every_arm_figure_and_record(study: Study, tmp_path: Path):
    run_study(study, chosen(["main", "adv_beta_001"]), [0, 1])
    page = tmp_path / "results.md"
    assert main(["--records", str(study.records), "--page", str(page)]) == 0
    text = page.read_text()
    assert all(f"| {ARMS[name].title} | 0, 1 |" in text for name in MAIN)
    assert "beta 0.01" in text
    assert "| end-to-end RL | 0, 1 | +0.0 [+0.0, +0.0] | +0.0 [+0.0, +0.0] | +0.0 [+0.0, +0.0] |" in text
    assert "| arm | cancel | refuse | fails most by |" in text
    assert "| SFT | 50.0 % | 10.0 % | wrong_order 25.0 %, told_nobody 20.8 % |" in text
    assert text.count("-seed1.json`") == len(MAIN) + 1
    for name in ("success-rollouts", "success-seconds", "reward-std", "gamma"):
        svg = (study.records / f"study_outfitters-{name}.svg").read_text()
        assert svg.startswith('<svg xmlns="http://www.w3.org/2000/svg"')
        assert f"(records/study_outfitters-{name}.svg)" in text
    assert "(figure 1 of the paper). Seeds 0, 1." in text
    # Both curves are the same but for rollouts: 64 a step after a profile of 32, against 320 a step.
    assert "| 60.0 % |" not in text.split("### While training")[0]
    assert "| PivotRL (adv, functional) | 0, 1 | 20.0 % | 60.0 % | 60.0 % | 4, 4 |" in text
    assert "| 288 | 1280 | 4.4 |" in text
    again = write_results(study.records, page)
    assert again == text


def test_curves_are_means_over_the_same_seeds() -> None:
    def arm(*seeds: int) -> list[dict[str, Any]]:
        return [{"seed": seed} for seed in seeds]

    arms = {"adv": arm(0, 1, 2), "e2e": arm(1, 2, 3), "cand": arm(0, 1, 2), "mixed": arm(1), "sft": arm(1, 2)}
    names = ("adv", "cand", "mixed", "e2e")
    assert same_seeds(arms, names, ("adv", "e2e")) == {"adv": arm(1, 2), "cand": arm(1, 2), "e2e": arm(1, 2)}
    assert same_seeds(arms, names, ("dapo",)) == {name: arms[name] for name in names}
    apart = {"adv": arm(0), "e2e": arm(1)}
    assert same_seeds(apart, names, ("adv", "e2e")) == apart


def test_a_sweep_stands_beside_what_it_changes(study: Study, tmp_path: Path):
    sweep = replace(study, split="validation")
    run_study(sweep, chosen(["adv", "adv_group_4"]), [0])
    swept = sweep.records / "study_outfitters-adv_group_4-seed0-validation.json"
    record = read_json(swept)
    record["policy"]["greedy"]["per_task"] = dict.fromkeys(record["policy"]["greedy"]["per_task"], 1.0)
    write_json(swept, record)
    text = write_results(study.records, tmp_path / "results.md")
    right = sum(read_json(swept)["policy"]["sampled"]["per_task"].values())
    assert "## study_outfitters, validation tasks" in text
    assert "### In the domain" not in text  # a lone arm is compared to its sweep alone
    assert not list(study.records.glob("*.svg"))
    table = text.split("### One setting changed")[1]
    assert table.count("against PivotRL (adv, functional)") == 2
    row = next(line for line in table.splitlines() if line.startswith("| G 4 |"))
    assert f"| G 4 | 0 | 100.0 % [100.0, 100.0] | {100 * (1 - right / 12):+.1f} [" in row
    assert "| +0.0 [+0.0, +0.0] |" in row


def test_arms_of_a_seed_with_different_start_policies_are_not_compared(study: Study):
    run_study(study, chosen(["base", "sft"]), [0, 1])
    path = study.records / "study_outfitters-sft-seed1.json"
    write_json(path, {**read_json(path), "start_policy": "another"})
    with pytest.raises(UserError, match=r"sft-seed1\.json starts from another policy than .*base-seed1\.json"):
        read_records(study.records)


def test_arms_judged_by_different_environments_are_not_compared(study: Study):
    run_study(study, chosen(["base", "sft"]), [0])
    path = study.records / "study_outfitters-sft-seed0.json"
    write_json(path, {**read_json(path), "environment": "outfitters 1"})
    with pytest.raises(
        UserError, match=r"sft-seed0\.json was judged by outfitters 1, .*base-seed0\.json by outfitters 1\.1"
    ):
        read_records(study.records)


def test_pages_without_records_or_with_foreign_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["--records", str(tmp_path), "--page", str(tmp_path / "x.md")]) == 2
    assert "python -m experiments.study" in capsys.readouterr().err
    write_json(tmp_path / "other.json", {"arm": "mine"})
    with pytest.raises(UserError, match="no record of an arm"):
        read_records(tmp_path)


def test_options():
    args = parse(["evaluate.tasks=3", "--arms", "adv,sft", "--split", "validation", "seed=4"])
    assert (args.arms, args.split, args.overrides, args.seeds) == (
        "adv,sft",
        "validation",
        ["evaluate.tasks=3", "seed=4"],
        "0,1,2",
    )


# Aggregation


def test_intervals_resample_seeds_and_tasks():
    even = {s: {str(i): float(i % 2) for i in range(50)} for s in range(3)}
    found = stats.estimate(even)
    assert found is not None
    assert (found.mean, found.seeds, found.n) == (0.5, 3, 150)
    apart = {0: dict.fromkeys("abcde", 0.0), 1: dict.fromkeys("abcde", 1.0)}
    wide = stats.estimate(apart)
    assert wide is not None
    assert (wide.low, wide.high) == (0.0, 1.0)  # two seeds that disagree say nothing of a third
    assert found.high - found.low < 0.3
    assert stats.estimate({}) is None


def test_differences_are_paired():
    ours, theirs = {0: {"a": 1.0, "b": 1.0, "c": 0.0}}, {0: {"a": 0.0, "b": 0.0, "d": 1.0}, 1: {"a": 1.0}}
    found = stats.paired(ours, theirs)
    assert found is not None
    assert (found.mean, found.low, found.high, found.n) == (1.0, 1.0, 1.0, 2)


def test_where_a_curve_reaches_a_level():
    points = [(0.0, 0.2), (10.0, 0.4), (20.0, 0.4), (30.0, 0.8)]
    assert stats.reaches(points, 0.3) == pytest.approx(5.0)
    assert stats.reaches(points, 0.6) == pytest.approx(25.0)
    assert stats.reaches(points, 0.1) == 0.0
    assert stats.reaches(points, 0.9) is None


def test_gamma_is_largest_for_mixed_turns():
    counts = {"0/8": 10, "4/8": 2, "8/8": 5, "7/8": 1}
    std, value, turns = stats.gamma(counts, "adv", 0.6, 1.0)
    assert (std, turns) == (0.5, 2)
    assert 0 < value < 0.5  # the KL path has already moved towards the right action
    assert stats.gamma(counts, "mixed", 0.6, 1.0)[2] == 3
    assert stats.gamma(counts, "cand", 0.6, 1.0)[0] < std
    assert stats.gamma({"8/8": 5}, "mixed", 0.6, 1.0) == (0.0, 0.0, 0)
