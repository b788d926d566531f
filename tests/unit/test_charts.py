"""Charts: finite, escaped, and in the right place."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotrl.tracking.charts import (
    WIDTH,
    Bar,
    Interval,
    Point,
    Series,
    histogram,
    interval_chart,
    label,
    line_chart,
    scatter,
    stacked_bar,
    strip,
    ticks,
)

HOSTILE = '"><script>alert(1)</script>&'
NUMBERS = st.floats(allow_nan=True, allow_infinity=True, width=32)


def parse(svg: str) -> ElementTree.Element:
    """Well formed, and every number in it finite."""
    root = ElementTree.fromstring(svg)
    assert not re.search(r"\b(nan|inf)\b", svg)
    assert "<script" not in svg
    return root


@given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=30))
def test_lines_and_bubbles_are_finite_for_any_numbers(points: list[tuple[float, float]]) -> None:
    for svg in (
        line_chart([Series("a", points, "#123456"), Series(HOSTILE, points[:2], "#000")], "x", HOSTILE),
        scatter([Point(x, y, 1.0, "#fff", HOSTILE) for x, y in points], "x", "y", shade=(0, 0.6, 0, HOSTILE)),
    ):
        if any(math.isfinite(x) and math.isfinite(y) for x, y in points):
            parse(svg)
        else:
            assert svg == ""


def test_a_gap_breaks_the_line() -> None:
    svg = line_chart([Series("a", [(0, 1), (1, 2), (2, math.nan), (3, 1)], "#000")], "step")
    assert svg.count("<polyline") == 2


def test_a_long_legend_has_rows_and_the_lines_stay_below_it() -> None:
    names = [f"an arm of the study ({n} seeds)" for n in range(5)]
    root = parse(line_chart([Series(name, [(0, 1), (1, 2)], "#000") for name in names], "step"))
    shown = {t.text: (float(t.get("x") or 0), float(t.get("y") or 0)) for t in root.iter("text") if t.text in names}
    assert list(shown) == names
    assert all(x + 6.2 * len(name) < WIDTH for name, (x, _) in shown.items())
    assert len(set(shown.values())) == 5
    lowest = max(y for _, y in shown.values())
    assert all(float(dot.get("cy") or 0) > lowest for dot in root.iter("circle"))


def test_bars_are_as_tall_as_their_counts_and_stack() -> None:
    root = parse(histogram([Bar(0, 1, 10, "#111"), Bar(0, 1, 5, "#222"), Bar(1, 2, 0, "#333")], "reward", "turns"))
    bars = [r for r in root.iter("rect") if r.get("rx")]
    heights = [float(b.get("height") or 0) for b in bars]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2)
    assert heights[2] == 0
    first, second = (float(b.get("y") or 0) for b in bars[:2])
    assert second + heights[1] == pytest.approx(first, abs=0.2)


def test_shares_of_a_stacked_bar() -> None:
    root = parse(stacked_bar([("a", 3, "#111"), ("b", 1, "#222"), (HOSTILE, 0, "#333")], width=400))
    widths = [float(r.get("width") or 0) for r in root.iter("rect") if r.get("height") == "22"]
    assert widths == [298.5, 98.5]


def test_intervals_lie_on_the_axis() -> None:
    root = parse(interval_chart([Interval(HOSTILE, 0.5, 0.25, 0.75, "#111"), Interval("b", 1.0, 0.9, 1.2, "#222")]))
    dots = [float(c.get("cx") or 0) for c in root.iter("circle")]
    ends = [(float(x.get("x1") or 0), float(x.get("x2") or 0)) for x in root.iter("line") if x.get("stroke-width")]
    assert sum(ends[0]) / 2 == pytest.approx(dots[0], abs=0.2)
    assert ends[1][1] == dots[1]  # 1.2 is no share: cut at 100 %


def test_nothing_to_draw_is_nothing() -> None:
    assert histogram([], "x", "y") == line_chart([], "x") == scatter([], "x", "y") == interval_chart([]) == ""
    assert stacked_bar([("a", 0, "#111")]) == ""


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6))
def test_ticks_are_few_round_and_inside(low: float, span: float) -> None:
    found = ticks(low, low + span)
    assert 2 <= len(found) <= 12
    slack = span * 1e-6 + 4 * math.ulp(abs(low) + span)  # a narrow axis far from zero ends where floats do
    assert all(low - slack <= t <= low + span + slack for t in found)


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (0.25, "0.25"), (1e-6, "1e-6"), (123456, "1.2e5"), (-0.02, "-0.02")]
)
def test_labels_are_short(value: float, text: str) -> None:
    assert label(value) == text


def test_strip_shares_its_width() -> None:
    text = strip([("a<", 1, "#000"), ("none", 0, "#111"), ("b", 3, "#222")], width=100)
    assert [float(w) for w in re.findall(r'<rect x="[\d.]+" y="0" width="([\d.]+)"', text)] == [24, 74]
    assert "<title>a&lt;: 1</title>" in text and "none: 0</title>" not in text
    assert "<rect" not in strip([("a", 0, "#000")])
