"""Line charts as inline SVG, and an HTML page for them, without scripts or network access."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise

WIDTH, HEIGHT = 420, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 24, 12, 34
COLOURS = ("#2a6fdb", "#d9730d", "#2f9e60", "#a33bb5", "#c2334d", "#7a8490")
LOG_FROM = 30  # ratio of largest to smallest value from which a scale is logarithmic
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


@dataclass(frozen=True, slots=True)
class Dot:
    """A value, and the text of its tooltip."""

    x: float
    y: float
    said: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """A line through `dots`; `strewn` are separate dots, for the single rounds of a measurement."""

    name: str
    dots: Sequence[Dot]
    strewn: Sequence[Dot] = ()


def document(title: str, parts: Sequence[str]) -> str:
    head = f'<meta charset="utf-8"><title>{escape(title)}</title><style>{STYLE}</style>'
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{"".join(parts)}</body></html>'


def chart(title: str, unit: str, axis: str, lines: Sequence[Line], *, every: bool = True) -> str:
    """Return the HTML of a chart, or "" if no line has a dot.

    With `every`, the x axis labels each value; otherwise it labels round numbers.
    """
    dots = [dot for line in lines for dot in (*line.dots, *line.strewn)]
    if not dots:
        return ""
    across = Scale([dot.x for dot in dots], LEFT, WIDTH - RIGHT, from_zero=not every)
    up = Scale([dot.y for dot in dots], HEIGHT - BOTTOM, TOP, from_zero=True)
    marks = [_grid(across, up, axis, across.values if every else across.ticks())]
    for line, colour in zip(lines, COLOURS, strict=False):
        path = [(across(dot.x), up(dot.y), dot.said) for dot in line.dots]
        marks.append(_line(path, colour))
        marks += [
            f'<circle cx="{across(dot.x)}" cy="{up(dot.y)}" r="1.6" fill="{colour}" opacity=".5"/>'
            for dot in line.strewn
        ]
    keys = "".join(
        f'<span class="key" style="color:{colour}">{escape(line.name)}</span>'
        for line, colour in zip(lines, COLOURS, strict=False)
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
        if said
    ]
    return "".join(strokes)


def _grid(across: Scale, up: Scale, axis: str, named: Sequence[float]) -> str:
    marks = []
    for tick in up.ticks():
        y = up(tick)
        marks.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        marks.append(f'<text x="{LEFT - 6}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
    for value in named:
        x = across(value)
        marks.append(f'<text x="{x}" y="{HEIGHT - 18}" text-anchor="middle">{value:.3g}</text>')
    middle = (LEFT + WIDTH) / 2
    marks.append(f'<text x="{middle}" y="{HEIGHT - 3}" text-anchor="middle">{axis}</text>')
    return "".join(marks)


class Scale:
    """Maps values to pixels; logarithmic if the values have a wide range and none is zero."""

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
        """Return about five round numbers; powers of ten if logarithmic."""
        if self.logarithmic:
            return [10.0**power for power in range(int(self._low), int(self._high) + 1)]
        raw = (self._high - self._low) / 5
        magnitude = 10 ** math.floor(math.log10(raw))
        step = next(step for n in (1, 2, 5, 10) if (step := n * magnitude) >= raw)
        count = int((self._high - self._low) / step + 1e-9)
        first = math.ceil(self._low / step) * step
        return [first + number * step for number in range(count + 1)]
