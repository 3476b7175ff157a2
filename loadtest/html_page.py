"""A report as one HTML file that needs nothing else: curves as inline SVG, no script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

from loadtest import report as reports
from loadtest.measure import Load, Point
from loadtest.report import Figure, Report, by_load, median, of

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 12, 34
COLOURS = ("#2a6fdb", "#d9730d", "#2f9e60", "#a33bb5")
LOG_FROM = 30  # a scale whose largest value is so many times its smallest is logarithmic
# Title, unit, factor, lines.
CHARTS: tuple[tuple[str, str, float, tuple[tuple[str, Figure], ...]], ...] = (
    (
        "Requests",
        "/s",
        1,
        (
            ("completed", lambda p: p.requests_per_s),
            ("goodput", lambda p: p.goodput),
            ("rejected", lambda p: p.rejected / p.seconds),
            ("failed", lambda p: sum(p.failed.values()) / p.seconds),
        ),
    ),
    ("Output tokens", "/s", 1, (("tokens", lambda p: p.tokens_per_s),)),
    (
        "Time to first token",
        "ms",
        1e3,
        (("p50", of("ttft", "p50")), ("p90", of("ttft", "p90")), ("p99", of("ttft", "p99"))),
    ),
    (
        "Between tokens",
        "ms",
        1e3,
        (("p50", of("itl", "p50")), ("p90", of("itl", "p90")), ("p99", of("itl", "p99"))),
    ),
    (
        "Whole answer",
        "ms",
        1e3,
        (("p50", of("e2e", "p50")), ("p90", of("e2e", "p90")), ("p99", of("e2e", "p99"))),
    ),
    ("The client's own CPU", "% of a core", 100, (("client", lambda p: p.client_cpu),)),
)
STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--faint:#8a929c;--line:#d5dae0;--paper:#fff}
@media(prefers-color-scheme:dark){:root{--ink:#e6e8eb;--line:#3a4048;--paper:#15181c}}
body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);
margin:2rem auto;max-width:1320px;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
.charts{display:flex;flex-wrap:wrap;gap:1rem}figure{margin:0}figcaption{font-weight:600}
svg text{font-size:11px;fill:var(--faint)}svg .grid{stroke:var(--line)}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.2rem .6rem;border-bottom:1px solid var(--line);text-align:right}
pre{white-space:pre-wrap;color:var(--faint)}.key{font-weight:400;font-size:.85rem;margin-left:.6rem}
"""


def page(report: Report) -> str:
    """The whole document."""
    groups = by_load(report.points)
    parts = [
        f"<h1>{escape(report.model)}: load test</h1>",
        f"<p>{escape(report.date)} · {escape(report.url)} · workload {escape(report.workload)} · "
        f"arrivals {escape(report.arrivals)}</p>",
    ]
    for loop, title, axis in (
        ("open", "Open loop: latency from the intended arrival", "requests/s asked"),
        ("closed", "Closed loop", "clients"),
    ):
        some = {load: points for load, points in groups.items() if load.loop == loop}
        if some:
            charts = "".join(_chart(some, axis, *chart) for chart in CHARTS)
            parts.append(f'<h2>{title}</h2><div class="charts">{charts}</div>')
    parts.append(f'<h2>Figures</h2><div class="scroll">{_table(report)}</div>')
    parts += [f"<p>{escape(note)}</p>" for note in reports.notes(report)]
    client = ", ".join(f"{name} {value}" for name, value in report.client.items())
    parts.append(f"<pre>{escape(report.command)}\nclient: {escape(client)}</pre>")
    head = f'<meta charset="utf-8"><title>{escape(report.model)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def _table(report: Report) -> str:
    head, _, *rows = (line.strip("| ").split("|") for line in reports.table(report).splitlines())
    lines = ["".join(f"<th>{escape(cell.strip())}</th>" for cell in head)]
    lines += ["".join(f"<td>{escape(cell.strip())}</td>" for cell in row) for row in rows]
    return "<table>" + "".join(f"<tr>{line}</tr>" for line in lines) + "</table>"


def _chart(
    groups: dict[Load, list[Point]],
    axis: str,
    title: str,
    unit: str,
    factor: float,
    lines: Sequence[tuple[str, Figure]],
) -> str:
    """One figure: a line through the medians of each load's rounds, and every round as a dot."""
    loads = sorted(groups, key=lambda load: load.value)
    dots = [
        (load.value, value * factor, number)
        for load in loads
        for number, (_, figure) in enumerate(lines)
        for point in groups[load]
        if (value := figure(point)) is not None
    ]
    if not dots:
        return ""
    across = Scale([load.value for load in loads], LEFT, WIDTH - RIGHT, from_zero=False)
    up = Scale([value for _, value, _ in dots], HEIGHT - BOTTOM, TOP, from_zero=True)
    marks = [_grid(across, up, axis)]
    for number, (name, figure) in enumerate(lines):
        path = [
            (
                across(load.value),
                up(value * factor),
                f"{name} at {load}: {value * factor:.4g} {unit}",
            )
            for load in loads
            if (value := median(groups[load], figure)) is not None
        ]
        marks.append(_line(path, COLOURS[number]))
    marks += [
        f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="1.6" fill="{COLOURS[n]}" opacity=".5"/>'
        for x, y, n in dots
    ]
    keys = "".join(
        f'<span class="key" style="color:{COLOURS[number]}">{name}</span>'
        for number, (name, _) in enumerate(lines)
    )
    caption = f"<figcaption>{title}, {unit}{' (log)' if up.logarithmic else ''}{keys}</figcaption>"
    picture = f'<svg width="{WIDTH}" height="{HEIGHT}" role="img">{"".join(marks)}</svg>'
    return f"<figure>{caption}{picture}</figure>"


def _line(path: Sequence[tuple[float, float, str]], colour: str) -> str:
    strokes = [
        f'<line x1="{a[0]:.1f}" y1="{a[1]:.1f}" x2="{b[0]:.1f}" y2="{b[1]:.1f}" '
        f'stroke="{colour}" stroke-width="2"/>'
        for a, b in pairwise(path)
    ]
    strokes += [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}"><title>{escape(said)}</title>'
        "</circle>"
        for x, y, said in path
    ]
    return "".join(strokes)


def _grid(across: Scale, up: Scale, axis: str) -> str:
    marks = []
    for tick in up.ticks():
        y = up(tick)
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for value in across.values:
        x = across(value)
        marks.append(f'<text x="{x}" y="{HEIGHT - 18}" text-anchor="middle">{value:.3g}</text>')
    middle = (LEFT + WIDTH) / 2
    marks.append(f'<text x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{axis}</text>')
    return "".join(marks)


class Scale:
    """From values to pixels; logarithmic where the values spread far and none is zero."""

    def __init__(
        self, values: Sequence[float], first: float, last: float, *, from_zero: bool
    ) -> None:
        self.values = sorted(set(values))
        low, high = self.values[0], self.values[-1]
        self.logarithmic = low > 0 and high / low > LOG_FROM
        if self.logarithmic:
            self._low, self._high = math.log10(low), math.log10(high)
            if from_zero:
                self._low, self._high = math.floor(self._low), math.ceil(self._high)
        else:
            self._low, self._high = (0.0, high * 1.05) if from_zero else (low, high)
        if self._high <= self._low:
            self._low, self._high = self._low - 1, self._high + 1
        self._first, self._last = first, last

    def __call__(self, value: float) -> float:
        value = math.log10(value) if self.logarithmic else value
        share = (value - self._low) / (self._high - self._low)
        return round(self._first + share * (self._last - self._first), 1)

    def ticks(self) -> list[float]:
        """About five round numbers."""
        if self.logarithmic:
            return [10.0**power for power in range(int(self._low), int(self._high) + 1)]
        raw = (self._high - self._low) / 5
        magnitude = 10 ** math.floor(math.log10(raw))
        step = next(step for n in (1, 2, 5, 10) if (step := n * magnitude) >= raw)
        count = int((self._high - self._low) / step + 1e-9)
        first = math.ceil(self._low / step) * step
        return [first + number * step for number in range(count + 1)]
