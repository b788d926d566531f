"""Small charts as inline SVG text: no script, no font, nothing from outside. Pure; all text is escaped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 14, 14, 42
_LEGEND_ROW = 13
_GRID, _TEXT, _AXIS = "#e6e8ec", "#5b6472", "#aab1bc"


@dataclass(frozen=True)
class Bar:
    """One bar of a histogram, from `low` to `high`, `count` tall."""

    low: float
    high: float
    count: float
    color: str
    title: str = ""  # shown when pointed at


@dataclass(frozen=True)
class Point:
    x: float
    y: float
    weight: float = 1.0  # area of the bubble
    color: str = "#3b6fd4"
    title: str = ""


@dataclass(frozen=True)
class Series:
    name: str
    points: Sequence[tuple[float, float]]  # (x, y); NaN and infinities are gaps
    color: str


@dataclass(frozen=True)
class Interval:
    """One row of an interval chart: an estimate in [0, 1] and its confidence interval."""

    label: str
    value: float
    low: float
    high: float
    color: str


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover [low, high]: 1, 2 or 5 times a power of ten apart."""
    span = high - low
    if not (math.isfinite(span) and span > 0):
        return [low]
    raw = span / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def label(value: float) -> str:
    """A short number for an axis."""
    if value == 0:
        return "0"
    if abs(value) >= 10_000 or abs(value) < 0.001:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    return f"{value:.4g}"


class _Frame:
    """Axes: data coordinates to pixels, grid, ticks and axis titles."""

    def __init__(
        self, x: tuple[float, float], y: tuple[float, float], x_title: str, y_title: str, top: int = _TOP
    ) -> None:
        self.top = top
        self.x0, self.x1 = _widened(*x)
        self.y0, self.y1 = _widened(*y)
        self.parts: list[str] = []
        for value in ticks(self.y0, self.y1):
            py = self.py(value)
            self.parts.append(
                f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{py:.1f}" y2="{py:.1f}" stroke="{_GRID}"/>'
            )
            self.text(_LEFT - 7, py + 3.5, label(value), "end")
        for value in ticks(self.x0, self.x1, 6):
            self.text(self.px(value), HEIGHT - _BOTTOM + 16, label(value), "middle")
        base = HEIGHT - _BOTTOM
        self.parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{base}" y2="{base}" stroke="{_AXIS}"/>')
        self.text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, x_title, "middle")
        if y_title:
            middle = (top + base) / 2
            self.parts.append(
                f'<text transform="translate(13 {middle:.1f}) rotate(-90)" text-anchor="middle">'
                f"{escape(y_title)}</text>"
            )

    def px(self, x: float) -> float:
        return _LEFT + (x - self.x0) / (self.x1 - self.x0) * (WIDTH - _LEFT - _RIGHT)

    def py(self, y: float) -> float:
        return HEIGHT - _BOTTOM - (y - self.y0) / (self.y1 - self.y0) * (HEIGHT - self.top - _BOTTOM)

    def text(self, x: float, y: float, text: str, anchor: str, color: str = "") -> None:
        fill = f' fill="{escape(color)}"' if color else ""
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{fill}>{escape(text)}</text>')

    def svg(self, name: str) -> str:
        return _svg(WIDTH, HEIGHT, name, self.parts)


def _svg(width: float, height: float, name: str, parts: list[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{escape(name)}" font-size="11" '
        f'fill="{_TEXT}" font-family="inherit">{"".join(parts)}</svg>'
    )


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range that can be divided by."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return 0.0, 1.0
    if high - low < 1e-12 * max(abs(low), abs(high), 1e-9):
        pad = abs(low) * 0.1 or 1.0
        return low - pad, high + pad
    return low, high


def histogram(bars: Sequence[Bar], x_title: str, y_title: str) -> str:
    """Bars side by side; bars of one place are stacked in the order given."""
    if not bars:
        return ""
    tops: dict[tuple[float, float], float] = {}
    for bar in bars:
        tops[bar.low, bar.high] = tops.get((bar.low, bar.high), 0.0) + bar.count
    x = min(b.low for b in bars), max(b.high for b in bars)
    frame = _Frame(x, (0.0, max(*tops.values(), 1.0) * 1.06), x_title, y_title)
    below: dict[tuple[float, float], float] = {}
    for bar in bars:
        start = below.get((bar.low, bar.high), 0.0)
        below[bar.low, bar.high] = start + bar.count
        left, right = frame.px(bar.low), frame.px(bar.high)
        top, bottom = frame.py(start + bar.count), frame.py(start)
        frame.parts.append(
            f'<rect x="{left + 1:.1f}" y="{top:.1f}" width="{max(right - left - 2, 0.5):.1f}" '
            f'height="{max(bottom - top, 0):.1f}" fill="{escape(bar.color)}" rx="1.5">'
            f"<title>{escape(bar.title)}</title></rect>"
        )
    return frame.svg(f"{y_title} by {x_title}")


def scatter(
    points: Sequence[Point],
    x_title: str,
    y_title: str,
    x_range: tuple[float, float] | None = None,
    y_range: tuple[float, float] | None = None,
    shade: tuple[float, float, float, str] | None = None,
    curve: Sequence[tuple[float, float]] = (),
) -> str:
    """Bubbles. `shade` is (x low, x high, y low, text): a region that is marked; `curve` is a dotted guide."""
    kept = [p for p in points if math.isfinite(p.x) and math.isfinite(p.y)]
    if not kept:
        return ""
    x = x_range or (min(p.x for p in kept), max(p.x for p in kept))
    y = y_range or (min(p.y for p in kept), max(p.y for p in kept))
    frame = _Frame(x, y, x_title, y_title)
    if shade:
        left, right = frame.px(shade[0]), frame.px(shade[1])
        frame.parts.append(
            f'<rect x="{left:.1f}" y="{_TOP}" width="{max(right - left, 0):.1f}" '
            f'height="{max(frame.py(shade[2]) - _TOP, 0):.1f}" '
            f'fill="#0f8a7e" opacity="0.09"/>'
        )
        frame.text(left + 6, _TOP + 13, shade[3], "start", "#0b6e65")
    if curve:
        path = " ".join(f"{frame.px(a):.1f},{frame.py(b):.1f}" for a, b in curve)
        frame.parts.append(f'<polyline points="{path}" fill="none" stroke="{_AXIS}" stroke-dasharray="2 4"/>')
    largest = max(p.weight for p in kept) or 1.0
    for p in sorted(kept, key=lambda p: -p.weight):  # small ones on top
        radius = 3 + 15 * math.sqrt(max(p.weight, 0) / largest)
        frame.parts.append(
            f'<circle cx="{frame.px(p.x):.1f}" cy="{frame.py(p.y):.1f}" r="{radius:.1f}" fill="{escape(p.color)}" '
            f'fill-opacity="0.72" stroke="#fff" stroke-width="1"><title>{escape(p.title)}</title></circle>'
        )
    return frame.svg(f"{y_title} against {x_title}")


def line_chart(series: Sequence[Series], x_title: str, y_title: str = "") -> str:
    """Lines with a legend when there are several; a lone point is a dot."""
    finite = [p for s in series for p in s.points if math.isfinite(p[0]) and math.isfinite(p[1])]
    if not finite:
        return ""
    xs, ys = [p[0] for p in finite], [p[1] for p in finite]
    pad = (max(ys) - min(ys)) * 0.06
    low = 0.0 if min(ys) == 0 else min(ys) - pad
    legend = _legend([s.name for s in series]) if len(series) > 1 else []
    top = _TOP + max((row for _, row in legend), default=0) * _LEGEND_ROW
    frame = _Frame((min(xs), max(xs)), (low, max(ys) + pad), x_title, y_title, top)
    for s in series:
        for run in _runs(s.points):
            pixels = [f"{frame.px(x):.1f},{frame.py(y):.1f}" for x, y in run]
            frame.parts.append(
                f'<polyline points="{" ".join(pixels)}" fill="none" stroke="{escape(s.color)}" stroke-width="1.8" '
                'stroke-linejoin="round"/>'
            )
            if len(s.points) <= 60 or len(run) == 1:
                for x, y in run:
                    frame.parts.append(
                        f'<circle cx="{frame.px(x):.1f}" cy="{frame.py(y):.1f}" r="2.2" fill="{escape(s.color)}">'
                        f"<title>{escape(s.name)}: {label(y)} at {label(x)}</title></circle>"
                    )
    for s, (left, row) in zip(series, legend, strict=False):
        y = _TOP - 4 + row * _LEGEND_ROW
        frame.parts.append(f'<rect x="{left:.0f}" y="{y - 5}" width="10" height="3" fill="{escape(s.color)}"/>')
        frame.text(left + 14, y, s.name, "start")
    return frame.svg(y_title or ", ".join(s.name for s in series))


def _legend(names: Sequence[str]) -> list[tuple[float, int]]:
    """Place and row of each name: in rows that the chart is wide enough for."""
    places: list[tuple[float, int]] = []
    left, row = _LEFT + 8.0, 0
    for name in names:
        width = 30 + 6.2 * len(name)
        if left + width > WIDTH and left > _LEFT + 8.0:
            left, row = _LEFT + 8.0, row + 1
        places.append((left, row))
        left += width
    return places


def _runs(points: Sequence[tuple[float, float]]) -> list[list[tuple[float, float]]]:
    """Stretches of finite points: a NaN breaks the line."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(x) and math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def interval_chart(rows: Sequence[Interval], width: int = 460) -> str:
    """Estimates of shares with their confidence intervals, one a line, on an axis from 0 to 100 %."""
    if not rows:
        return ""
    left, right, line = 74, 62, 26
    height = line * len(rows) + 34

    def px(share: float) -> float:
        return left + min(max(share, 0.0), 1.0) * (width - left - right)

    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        x = px(share)
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="4" y2="{height - 26}" stroke="{_GRID}"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle">{100 * share:g} %</text>')
    for i, row in enumerate(rows):
        y = 4 + line * i + line / 2
        parts.append(
            f'<text x="{left - 12}" y="{y + 4:.1f}" text-anchor="end" fill="#1f2733">{escape(row.label)}</text>'
        )
        parts.append(
            f'<line x1="{px(row.low):.1f}" x2="{px(row.high):.1f}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="{escape(row.color)}" stroke-width="3" stroke-linecap="round" opacity="0.45"/>'
        )
        parts.append(f'<circle cx="{px(row.value):.1f}" cy="{y:.1f}" r="5" fill="{escape(row.color)}"/>')
        parts.append(f'<text x="{width - right + 12}" y="{y + 4:.1f}">{100 * row.value:.1f} %</text>')
    return _svg(width, height, "shares with confidence intervals", parts)


def stacked_bar(parts: Sequence[tuple[str, float, str]], width: int = 940) -> str:
    """One horizontal bar of (name, count, colour), with a legend that gives counts and shares."""
    total = sum(count for _, count, _ in parts)
    if total <= 0:
        return ""
    out, x, legend = [], 0.0, 0.0
    for name, count, color in parts:
        share = count / total
        if count > 0:
            tip = escape(f"{name}: {count:g} ({100 * share:.1f} %)")
            out.append(
                f'<rect x="{x:.1f}" y="0" width="{max(share * width - 1.5, 0.5):.1f}" height="22" '
                f'fill="{escape(color)}" rx="2"><title>{tip}</title></rect>'
            )
        x += share * width
        text = f"{name} {count:g} ({100 * share:.0f} %)"
        out.append(f'<rect x="{legend:.0f}" y="34" width="10" height="10" rx="2" fill="{escape(color)}"/>')
        out.append(f'<text x="{legend + 15:.0f}" y="43">{escape(text)}</text>')
        legend += 38 + 6.1 * len(text)
    return _svg(width, 50, "shares", out)


def strip(parts: Sequence[tuple[str, float, str]], width: int = 150) -> str:
    """A thin bar of (name, count, colour) for a line of a table; names and counts are tool tips."""
    total = sum(count for _, count, _ in parts)
    out, x = [], 0.0
    for name, count, color in parts:
        if count > 0:
            share, tip = count / total * width, f"{name}: {count:g}"
            out.append(
                f'<rect x="{x:.1f}" y="0" width="{max(share - 1, 0.5):.1f}" height="10" rx="1.5" '
                f'fill="{escape(color)}"><title>{escape(tip)}</title></rect>'
            )
            x += share
    return _svg(width, 10, ", ".join(f"{name} {count:g}" for name, count, _ in parts), out)
