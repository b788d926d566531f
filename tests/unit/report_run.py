"""A run directory as the report reads it: every stage done, with plausible invented figures."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from pivotrl.config import Config
from pivotrl.configuration import save_resolved
from pivotrl.io import write_json, write_jsonl
from pivotrl.tracking import report_data

HOSTILE = '<script>alert("x")</script> & </pre> ünïcode 日本'
TOOLS = ["get_order", "cancel_order", "exchange_item", "find_customer"]
Row = dict[str, Any]


def build_run(run_dir: Path, turns: int = 120, seed: int = 0) -> Path:
    """A run that passed through every stage."""
    draw = random.Random(seed)
    save_resolved(Config(run_dir=str(run_dir)), run_dir)
    rows, turn_rows, rollouts = [], [], []
    for i in range(turns):
        p = draw.choice([0.0, 0.0, 0.0, 0.12, 0.3, 0.5, 0.8, 1.0, 1.0])
        right = sum(draw.random() < p for _ in range(8))
        demonstration = {
            "text": "",
            "tool_calls": [{"name": draw.choice(TOOLS), "arguments": {"order_id": f"W{1000 + i}"}}],
        }
        rows.append(_profile_row(i, right, demonstration, draw))
        turn_rows.append(_turn_row(i, demonstration))
        rollouts += [_rollout(i, k, k < right, demonstration, draw) for k in range(8)]
    pivots = [{"turn_id": r["turn_id"], "mean": r["mean"]} for r in rows if 0 < (r["mean"] or 0) < 0.6]
    write_jsonl(run_dir / "profile" / "turns.jsonl", rows)
    write_jsonl(run_dir / "profile" / "rollouts.jsonl", rollouts)
    write_jsonl(run_dir / "turns" / "turns.jsonl", turn_rows)
    write_jsonl(run_dir / "select" / "pivots.jsonl", pivots)
    _write_profile(run_dir, rows, pivots)
    _write_training(run_dir, draw)
    _write_evaluation(run_dir)
    stages = {
        s: {"seconds": 30.0 * i, "peak_rss_gib": 1.5 + i, "attempts": 1}
        for i, s in enumerate(report_data.STAGE_ORDER[:-1], 1)
    }
    write_json(run_dir / "pipeline.json", {"stages": stages})
    return run_dir


def _turn_id(i: int) -> str:
    return f"retail_{i // 5:03d}#{i % 5}"


def _unscorable(i: int) -> bool:
    return i == 7


def _profile_row(i: int, right: int, demonstration: Row, draw: random.Random) -> Row:
    unscorable = 8 * _unscorable(i)
    mean = None if unscorable else right / 8
    return {
        "turn_id": _turn_id(i),
        "trajectory_id": f"retail_{i // 5:03d}",
        "depth": i % 5,
        "demonstration": [demonstration["tool_calls"][0]["name"]],
        "domain": "outfitters",
        "family": draw.choice(["returns", "orders", "profile"]),
        "n": 8,
        "right": 0 if unscorable else right,
        "wrong": 0 if unscorable else 8 - right,
        "unscorable": unscorable,
        "truncated": draw.choice([0, 0, 1]),
        "no_action": draw.choice([0, 0, 0, 1]),
        "mean": mean,
        "variance": None if mean is None else mean * (1 - mean),
        "unique_actions": draw.randint(1, 8),
        "prompt_tokens": 900,
        "generated_tokens": 300,
    }


def _turn_row(i: int, demonstration: Row) -> Row:
    return {
        "id": _turn_id(i),
        "messages": [
            {"role": "system", "content": "You are an agent of an outdoor shop."},
            {
                "role": "user",
                "content": f"Hello, my order W{1000 + i} has a torn sleeve. {HOSTILE if i == 3 else ''}",
            },
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "1", "name": "find_customer", "arguments": {"email": "ada@example.com"}}],
            },
            {
                "role": "tool",
                "name": "find_customer",
                "tool_call_id": "1",
                "content": '{"customer_id": "C17", "orders": ["W1000"]}',
            },
        ],
        "demonstration": demonstration,
    }


def _rollout(i: int, k: int, good: bool, demonstration: Row, draw: random.Random) -> Row:
    unscorable = _unscorable(i)
    text = (
        "" if good else draw.choice(["Could you tell me your order number?", "I have cancelled it for you.", HOSTILE])
    )
    return {
        "turn_id": _turn_id(i),
        "index": k,
        "finish_reason": "stop" if draw.random() < 0.9 else "length",
        "action": demonstration if good else {"text": text, "tool_calls": []},
        "reward": None if unscorable else float(good),
        "reason": "time_out" if unscorable else "match" if good else "text_instead_of_call",
    }


def _write_profile(run_dir: Path, rows: list[Row], pivots: list[Row]) -> None:
    turns = len(rows)
    mixed = sum(0 < (r["mean"] or 0) < 1 for r in rows)
    write_json(
        run_dir / "turns" / "summary.json",
        {"trajectories": {"read": 25, "kept": 24, "skipped": {"too_long": 1}}, "turns": {"kept": turns}},
    )
    write_json(
        run_dir / "profile" / "summary.json",
        {
            "turns": turns,
            "rollouts": 8 * turns,
            "uninformative_share": 0.6,
            "verdicts": {"match": 700, "text_instead_of_call": 260},
            "tokens": {"prompt": 864_000, "cached": 790_112, "generated": 36_480},
            "seconds": 212.0,
        },
    )
    write_json(
        run_dir / "select" / "summary.json",
        {
            "set": "adv",
            "lambda_diff": 0.6,
            "counts": {"cand": turns, "mixed": mixed, "adv": len(pivots), "adv_zeros": len(pivots) + 40},
            "kept": len(pivots),
            "adv_by_lambda": {f"{k / 10:g}": 4 * k for k in range(1, 11)},
            "adv_zeros_by_lambda": {f"{k / 10:g}": 4 * k + 40 for k in range(1, 11)},
            "informative_share": {"2": 0.2, "8": 0.4},
            "kept_informative_share_second_profile": {"2": 0.35},
        },
    )


def _write_training(run_dir: Path, draw: random.Random) -> None:
    metrics = []
    for step in range(20):
        metrics.append(
            {
                "step": step,
                "reward": 0.3 + 0.02 * step + draw.gauss(0, 0.03),
                "mixed_groups": 0.8 - 0.015 * step,
                "right_groups": 0.1 + 0.01 * step,
                "wrong_groups": 0.1 + 0.005 * step,
                "group_std": 0.42 - 0.006 * step,
                "loss": draw.gauss(0, 0.02) if step != 9 else "nan",
                "kl": 0.0004 * step,
                "mismatch_abs": 0.003 + abs(draw.gauss(0, 0.0005)),
                "grad_norm": 1.4 - 0.03 * step,
                "entropy": 1.1 - 0.02 * step,
                "seconds": 9 + draw.random(),
                "learning_rate": 1e-6,
            }
        )
    write_jsonl(run_dir / "train" / "metrics.jsonl", metrics)
    looks = [{"step": s, "success": 0.2 + 0.02 * s, "n": 28, "split": "validation"} for s in (0, 5, 10, 15)]
    write_jsonl(run_dir / "train" / "curve.jsonl", [*looks, {**looks[0], "step": 20, "success": None}])
    write_jsonl(run_dir / "train" / "groups.jsonl", [row for step in range(20) for row in _groups(step)])
    write_json(
        run_dir / "train" / "summary.json",
        {
            "steps": 20,
            "exported_step": 15,
            "rollouts": 1280,
            "tokens": {"prompt": 1_152_000, "generated": 51_200, "trained": 51_200},
        },
    )
    for stage in ("warmup", "sft"):
        write_jsonl(run_dir / stage / "metrics.jsonl", [{"step": s, "loss": 1.8 * 0.9**s + 0.3} for s in range(20)])
        write_json(run_dir / stage / "summary.json", {"steps": 20})


def _groups(step: int) -> list[Row]:
    """Calls are learned, hand-overs lost; one group of the judge's could not be scored."""
    late = step >= 7
    means = {"find_customer": 1.0 if late else 0.5, "transfer_to_human": 0.0 if late else 0.5, "(text)": None}
    return [
        {
            "step": step,
            "turn_id": f"{name}#0",
            "demonstration": [name],
            "mean": mean,
            "variance": None if mean is None else mean * (1 - mean),
        }
        for name, mean in means.items()
    ]


def _write_evaluation(run_dir: Path) -> None:
    cell = {"success": 0.25, "ci": [0.13, 0.41], "n": 40, "by_family": {"returns": 0.2, "orders": 0.4, "profile": 0.1}}
    better = {"success": 0.5, "ci": [0.35, 0.65], "n": 40, "by_family": {"returns": 0.5, "orders": 0.6, "profile": 0.4}}
    ood = {"accuracy": 0.43, "ci": [0.34, 0.53], "n": 100, "name": "HellaSwag"}
    write_json(
        run_dir / "evaluate" / "summary.json",
        {
            "policies": {
                "base": {"greedy": cell, "sampled": cell, "ood": ood},
                "sft": {"greedy": {**better, "success": 0.45}, "sampled": better, "ood": {**ood, "accuracy": 0.39}},
                "pivotrl": {"greedy": better, "sampled": better, "ood": ood},
            },
            "differences": {"pivotrl - base": {"greedy": {"difference": 0.25, "ci": [0.1, 0.4]}}},
        },
    )
