"""The report: complete, partial and hostile runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from report_run import build_run

from pivotrl.config import Config
from pivotrl.io import write_json, write_jsonl
from pivotrl.tracking import report, report_data


class _Balance(HTMLParser):
    """Checks that tags close in order and that nothing is loaded from outside."""

    VOID = frozenset({"meta", "br", "img", "link", "input", "hr"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            assert name not in ("src", "srcset", "onclick", "onload"), (tag, name)
            assert name != "href" or (value or "").startswith("#"), value
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag, tag


def check_html(text: str) -> list[str]:
    parser = _Balance()
    parser.feed(text)
    assert parser.open == []
    assert "script" not in parser.tags
    assert not re.search(r"url\(|@import|https?://", text.split("<main>")[0])
    return parser.tags


def test_full_run_shows_every_section(tmp_path: Path) -> None:
    build_run(tmp_path / "demo")
    summary = report.run_report(Config(run_dir=str(tmp_path / "demo")), tmp_path / "demo")
    text = Path(summary["path"]).read_text(encoding="utf-8")
    tags = check_html(text)
    assert "Not run" not in text
    assert tags.count("svg") >= 12
    assert json.loads((tmp_path / "demo/report/summary.json").read_text())["examples"] == 8 == summary["examples"]
    assert "25.0 % [13.0, 41.0] n=40" in text
    assert "PivotRL − Base, greedy</td><td>+25.0 points [+10.0, +40.0]" in text
    assert "864\u202f000" in text  # prompt tokens of the profile in the ledger


def test_every_mean_that_k_rollouts_can_have_is_a_bin(tmp_path: Path) -> None:
    build_run(tmp_path)
    data = report_data.load(tmp_path)
    titles = re.findall(r"<title>(\d+) turns [^<]*, mean near ([\d.]+)<", report.render(data))
    means = [r["mean"] for r in data.profile if r["mean"] is not None]
    assert {near for _, near in titles} == {f"{j / 8:.3g}" for j in range(9)}
    for j in range(9):
        assert sum(int(n) for n, near in titles if near == f"{j / 8:.3g}") == means.count(j / 8), j


def cells(text: str, first: str) -> list[str]:
    """The cells of the table line that begins with `first`, without tags."""
    line = next(m[1] for m in re.finditer(r"<tr>(.*?)</tr>", text, re.DOTALL) if re.match(f"<td[^>]*>{first}<", m[1]))
    return [re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<td[^>]*>(.*?)</td>", line, re.DOTALL)]


def test_what_was_mastered_and_what_was_lost(tmp_path: Path) -> None:
    build_run(tmp_path)
    whole = report.render(report_data.load(tmp_path))
    assert "Success on 28 watched tasks (validation)" in whole
    assert "PivotRL was exported at step 15" in whole
    text = whole.split("Mastered and lost")[1]
    assert "first and in the last 6 steps" in text
    # groups, strip, all wrong, all right; of the first and of the last steps
    assert cells(text, "find_customer") == ["find_customer", "6", "mixed: 6", "0", "0", "6", "all right: 6", "0", "6"]
    assert cells(text, "transfer_to_human")[3:] == ["0", "0", "6", "all wrong: 6", "6", "0"]
    assert cells(text, r"\(text\)")[3:5] == ["0", "0"]  # what could not be scored is neither


def test_the_profile_by_tool_depth_and_trajectory(tmp_path: Path) -> None:
    build_run(tmp_path)
    data = report_data.load(tmp_path)
    text = report.render(data)
    rows = [r for r in data.profile if r["demonstration"] == ["get_order"]]
    mixed = [r for r in rows if r["variance"]]
    found = cells(text, "get_order")
    assert found[1] == str(len(rows))
    assert found[3] == f"{100 * len(mixed) / len(rows):.0f} %"
    assert found[4] == str(sum(r["turn_id"] in data.pivots for r in rows))
    assert found[8] == str(sum(r["truncated"] for r in rows))
    assert len(cells(text, "outfitters / returns")) == 9
    assert "and 12 more" in text  # 24 trajectories, the 12 of most signal are shown
    depth_bars = sum(t.startswith("depth 3") or ", depth 3<" in t for t in re.findall(r"<title>[^<]*<", text))
    assert depth_bars == len({report_data.outcome(r) for r in data.profile if r["depth"] == 3})


def test_most_and_least_informative_turns_with_their_verdicts(tmp_path: Path) -> None:
    build_run(tmp_path)
    data = report_data.load(tmp_path)
    lists = dict(report_data.ranked(data))
    best = next(rows for title, rows in lists.items() if title.startswith("Most"))
    assert best[0]["variance"] == max(r["variance"] or 0 for r in data.profile)
    assert all(r["variance"] == 0 for title, rows in lists.items() if title.startswith("Least") for r in rows)
    assert all(r["unscorable"] or r["truncated"] for r in lists["Unscorable or truncated rollouts"])
    assert lists["Unscorable or truncated rollouts"][0]["turn_id"] == "retail_001#2"  # eight unscorable
    text = report.render(data)
    found = cells(text, f"<code>{best[0]['turn_id']}</code>")
    right = best[0]["right"]
    counts = sorted([f"match × {right}", f"text_instead_of_call × {8 - right}"], key=lambda t: (-int(t[-1]), t))
    assert found[-1] == ", ".join(counts)
    assert "time_out × 8" in text


def test_lambdas_group_sizes_verdicts_and_break_even(tmp_path: Path) -> None:
    build_run(tmp_path)
    text = report.render(report_data.load(tmp_path))
    assert cells(text, r"0.6 \(used\)") == ["0.6 (used)", "24", "64"]
    assert cells(text, "2") == ["2", "20 %", "35 %"]
    assert cells(text, "8") == ["8", "40 %", "–"]
    assert cells(text, "match") == ["match", "700", "72.9 %"]
    # 120 turns of 24 trajectories: 5 turns an episode; B x G = 64; the profile took 960
    assert cells(text, "one end-to-end step for a pivot step") == [
        *("one end-to-end step for a pivot step", f"{960 / (64 * 4):.1f}", "2\u202f240", "6\u202f400", "65 %")
    ]


def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    build_run(tmp_path)
    text = report.render(report_data.load(tmp_path))
    assert "<script>alert" not in text
    assert "&lt;script&gt;alert" in text
    assert "日本" in text


def test_empty_run_says_what_was_not_run(tmp_path: Path) -> None:
    text = report.render(report_data.load(tmp_path))
    check_html(text)
    for stage in ("evaluate", "profile", "train", "turns"):
        assert f"<code>pivotrl {stage}</code> has written nothing yet" in text


@pytest.mark.parametrize(
    "missing", ["turns", "profile", "select", "train", "sft", "warmup", "evaluate", "pipeline.json", "config.yaml"]
)
def test_any_part_may_be_missing(tmp_path: Path, missing: str) -> None:
    import shutil

    build_run(tmp_path, turns=40)
    target = tmp_path / missing
    shutil.rmtree(target) if target.is_dir() else target.unlink()
    check_html(report.render(report_data.load(tmp_path)))


def test_everything_unscorable(tmp_path: Path) -> None:
    row = {
        "turn_id": "a#0",
        "depth": 0,
        "domain": "d",
        "n": 4,
        "right": 0,
        "wrong": 0,
        "unscorable": 4,
        "mean": None,
        "variance": None,
    }
    write_jsonl(tmp_path / "profile" / "turns.jsonl", [row])
    check_html(report.render(report_data.load(tmp_path)))


def test_torn_last_line_is_ignored_and_last_row_of_a_step_wins(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 1}\n{"step": 0, "loss": 9}\n{"step": 1, "loss": 2}\n{"step": 2, "lo')
    rows = report_data.last_of_each_step(report_data.whole_rows(path))
    assert rows == [{"step": 0, "loss": 9}, {"step": 1, "loss": 2}]


def test_examples_are_pivots_then_flat_turns_of_different_trajectories() -> None:
    def row(turn_id: str, mean: float) -> dict:
        return {
            "turn_id": turn_id,
            "right": 1,
            "wrong": 1,
            "mean": mean,
            "variance": mean * (1 - mean),
            "unique_actions": 2,
        }

    rows = [row("a#0", 0.5), row("a#1", 0.5), row("b#0", 0.25), row("c#0", 0.0), row("d#0", 1.0), row("e#0", 0.75)]
    chosen = report_data.choose(rows, {"a#0", "a#1", "b#0"}, (2, 1, 1))
    assert [(kind, r["turn_id"]) for kind, r in chosen] == [
        ("pivot", "a#0"),
        ("pivot", "b#0"),
        ("all wrong", "c#0"),
        ("all right", "d#0"),
    ]


def test_equal_rollouts_merge_but_differing_verdicts_do_not() -> None:
    a = {"action": {"text": "x"}, "reward": 1.0, "reason": "match", "finish_reason": "stop"}
    merged = report_data.merge_equal([a, {**a, "reward": None}, dict(a), {**a, "reward": 0.0}])
    assert [(r["reward"], r["times"]) for r in merged] == [(1.0, 2), (0.0, 1), (None, 1)]


def test_the_ledger_has_a_line_for_profiling_again(tmp_path: Path) -> None:
    build_run(tmp_path)
    summary = json.loads((tmp_path / "train" / "summary.json").read_text())
    again = {"rollouts": 320, "prompt": 9_000, "cached": 8_000, "generated": 7_000, "seconds": 5.0}
    write_json(tmp_path / "train" / "summary.json", {**summary, "engine": {"train": again, "reprofile": again}})
    text = report.render(report_data.load(tmp_path))
    assert cells(text, "train, profiling again")[1:5] == ["320", "9\u202f000", "8\u202f000", "7\u202f000"]
    assert "<td>2\u202f560</td>" in text  # 960 + 1280 + 320
    assert cells(text, "train, profiling again")[6] == cells(text, "train")[6] == "5.0 s"  # of the engine


def test_an_adaptive_profile_tells_what_it_saved_and_promises(tmp_path: Path) -> None:
    build_run(tmp_path)
    assert "Adaptive profile" not in report.render(report_data.load(tmp_path))
    summary = json.loads((tmp_path / "profile" / "summary.json").read_text())
    told = {"saved_share": 0.512, "agreement_bound": 0.95, "expected_agreement": 0.957, "expected_lost": 0.06}
    write_json(tmp_path / "profile" / "summary.json", {**summary, "adaptive": told})
    text = report.render(report_data.load(tmp_path))
    check_html(text)
    assert cells(text, "rollouts saved") == ["rollouts saved", "51.2 %"]
    assert cells(text, "agreement of the kept sets, promised")[1] == "95.0 %"
