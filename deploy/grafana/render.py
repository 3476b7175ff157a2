"""Draw the dashboard as one SVG, with its own panels and the data of a running Prometheus.

    python -m deploy.grafana.render --prometheus http://127.0.0.1:9090 --minutes 5 dashboard.svg

Use it for pages and reports without Grafana. It supports only the panel types in dashboard.json.
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from deploy.grafana.dashboard import Panel, panels, substitute
from deploy.prometheus.api import Prometheus, Series

COLUMN, ROW, GAP = 60, 28, 6  # pixels: a cell of Grafana's grid, the space between panels
STEPS = 90  # points per curve
COLOURS = ("#3274d9", "#e0752d", "#1e8e3e", "#b8378c", "#8b6cc1", "#a1861d", "#d4443c", "#5a6b7b")
SHADES = ("#dceaf7", "#b3d3ee", "#7fb5e0", "#4a90cc", "#2268a8", "#0b3c6f")
SUFFIXES = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Window:
    """Time range of the drawing, in Unix seconds."""

    start: float
    end: float

    @property
    def step(self) -> float:
        return (self.end - self.start) / STEPS


@dataclass(frozen=True)
class Box:
    """Rectangle of the drawing, in pixels."""

    x: float
    y: float
    width: float
    height: float


def number(value: float, unit: str) -> str:
    """Format a value for readers: 12 ms, 3.4 k, 56 %."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        for size, name in ((1, "s"), (1e-3, "ms"), (1e-6, "µs")):
            if abs(value) >= size:
                return f"{value / size:.3g} {name}"
        return "0 s"
    after = {"reqps": "/s", "bytes": "B"}.get(unit, "")
    for size, letter in SUFFIXES:
        if abs(value) >= size:
            return f"{value / size:.3g} {letter}{after}"
    return f"{value:.3g} {after}".rstrip()


def text(x: float, y: float, content: str, size: int, colour: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" fill="{colour}" '
        f'text-anchor="{anchor}">{escape(content)}</text>'
    )


def legend_of(template: str, series: Series) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: series.labels.get(match[1], ""), template)


def nice_top(value: float) -> float:
    """Return the smallest 1, 2, 2.5 or 5 times a power of ten that is at least `value`."""
    if value <= 0:
        return 1.0
    power = 10.0 ** len(f"{int(value)}") if value >= 1 else 1.0
    while power / 10 >= value:
        power /= 10
    return next(power / 10 * m for m in (1, 2, 2.5, 5, 10) if power / 10 * m >= value)


def curve(points: Sequence[tuple[float, float]], box: Box, window: Window, top: float) -> str:
    """Return the SVG path of a line that is broken where values are missing."""
    parts, last = [], -1e18
    for at, value in points:
        x = box.x + (at - window.start) / (window.end - window.start) * box.width
        y = box.y + box.height * (1 - min(max(value / top, 0), 1))
        parts.append(f"{'L' if at - last < window.step * 1.5 else 'M'}{x:.0f} {y:.1f}")
        last = at
    return "".join(parts)


def draw_timeseries(panel: Panel, found: list[tuple[str, Series]], box: Box, at: Window) -> str:
    plot = Box(box.x + 52, box.y + 24, box.width - 62, box.height - 58)
    values = [value for _, series in found for _, value in series.points]
    top = panel.top or nice_top(max(values, default=1))
    out = axes(panel, plot, at, top)
    x, y = box.x + 10, box.y + box.height - 8
    for (name, series), colour in zip(found, COLOURS * 4, strict=False):
        line = curve(series.points, plot, at, top)
        out += f'<path d="{line}" fill="none" stroke="{colour}" stroke-width="1.4"/>'
        if x + 14 + 6 * len(name) < box.x + box.width:
            out += f'<rect x="{x:.0f}" y="{y - 7:.0f}" width="9" height="3" fill="{colour}"/>'
            out += text(x + 13, y, name, 10, "#444")
        x += 24 + 6 * len(name)
    return out


def axes(panel: Panel, plot: Box, at: Window, top: float) -> str:
    out = ""
    for share in (0, 0.5, 1):
        y = plot.y + plot.height * (1 - share)
        out += f'<path d="M{plot.x:.0f} {y:.0f}h{plot.width:.0f}" stroke="#e4e4e4"/>'
        out += text(plot.x - 5, y + 3, number(top * share, panel.unit), 9, "#777", "end")
    seconds = at.end - at.start
    for share in (0, 0.5, 1):
        label = f"{share * seconds / 60:.1f} min"
        anchor = ("start", "middle", "end")[int(share * 2)]
        y = plot.y + plot.height + 13
        out += text(plot.x + plot.width * share, y, label, 9, "#777", anchor)
    return out


def draw_stat(panel: Panel, found: list[tuple[str, Series]], box: Box, at: Window) -> str:
    points = found[0][1].points if found else []
    top = max((value for _, value in points), default=0) or 1
    spark = Box(box.x + 8, box.y + box.height - 34, box.width - 16, 26)
    shown = number(points[-1][1], panel.unit) if points else "–"
    line = curve(points, spark, at, top)
    out = f'<path d="{line}" fill="none" stroke="#9bbfe8" stroke-width="1.4"/>'
    return out + text(box.x + box.width / 2, box.y + 60, shown, 26, "#1f4e8c", "middle")


def draw_heatmap(panel: Panel, found: list[tuple[str, Series]], box: Box, at: Window) -> str:
    plot = Box(box.x + 52, box.y + 24, box.width - 62, box.height - 44)
    bounds = sorted((s for _, s in found), key=lambda s: float(s.labels["le"]))
    below: dict[float, float] = {}
    cells: list[tuple[float, int, float]] = []  # (time, bucket, count in this bucket alone)
    for bucket, series in enumerate(bounds):
        for moment, value in series.points:
            cells.append((moment, bucket, value - below.get(moment, 0.0)))
            below[moment] = value
    used = [bucket for _, bucket, count in cells if count > 0]
    if not used:
        return axes(panel, plot, at, 1)
    low, high = min(used), max(used)
    width, height = plot.width / (STEPS + 1), plot.height / (high - low + 1)
    most = max(count for _, _, count in cells)
    paths: dict[str, str] = {}
    for moment, bucket, count in cells:
        if count > 0:
            shade = SHADES[min(int(count / most * len(SHADES)), len(SHADES) - 1)]
            x = plot.x + (moment - at.start) / (at.end - at.start) * (plot.width - width)
            y = plot.y + plot.height - (bucket - low + 1) * height
            rectangle = f"M{x:.1f} {y:.0f}h{width:.1f}v{height:.0f}h-{width:.1f}z"
            paths[shade] = paths.get(shade, "") + rectangle
    out = "".join(f'<path d="{path}" fill="{shade}"/>' for shade, path in paths.items())
    for bucket in sorted({low, (low + high) // 2, high}):
        bound = float(bounds[bucket].labels["le"])
        label = f"≤ {number(bound, panel.unit)}" if bound != float("inf") else "more"
        y = plot.y + plot.height - (bucket - low + 0.5) * height + 3
        out += text(plot.x - 5, y, label, 9, "#777", "end")
    return out


Drawing = Callable[[Panel, list[tuple[str, Series]], Box, Window], str]
DRAW: dict[str, Drawing] = {
    "timeseries": draw_timeseries,
    "stat": draw_stat,
    "heatmap": draw_heatmap,
}


def draw(panel: Panel, found: list[tuple[str, Series]], at: Window) -> str:
    """Draw one panel with its frame and title."""
    box = Box(
        panel.x * COLUMN + GAP,
        panel.y * ROW + GAP,
        panel.width * COLUMN - GAP,
        panel.height * ROW - GAP,
    )
    if panel.kind == "row":
        return text(box.x, box.y + 17, panel.title, 15, "#222")
    frame = (
        f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="3" '
        'fill="#fff" stroke="#d8d8d8"/>'
    )
    title = text(box.x + 8, box.y + 15, panel.title, 11, "#222")
    return frame + title + DRAW[panel.kind](panel, found, box, at)


def render(prometheus: Prometheus, at: Window, rate_interval: str) -> str:
    """Draw the whole dashboard. `rate_interval` is the window of rates: at least four scrapes."""
    variables = {"__rate_interval": rate_interval, "model_name": ".*"}
    body, bottom = "", 0
    for panel in panels():
        found = []
        for query, legend in panel.queries:
            answer = prometheus.range(substitute(query, variables), at.start, at.end, at.step)
            found += [(legend_of(legend, series), series) for series in answer]
        body += draw(panel, found, at) + "\n"
        bottom = max(bottom, panel.y + panel.height)
    width, height = 24 * COLUMN + GAP, bottom * ROW + GAP
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'font-family="system-ui, sans-serif">\n<rect width="{width}" height="{height}" '
        f'fill="#f4f5f5"/>\n{body}</svg>\n'
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="SVG file to write")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="URL of Prometheus")
    parser.add_argument("--minutes", type=float, default=30.0, help="minutes to draw, up to now")
    parser.add_argument(
        "--rate-interval", default="1m", help="window of rates: at least four scrape intervals"
    )
    given = parser.parse_args()
    now = time.time()
    window = Window(now - given.minutes * 60, now)
    given.file.write_text(render(Prometheus(given.prometheus), window, given.rate_interval))


if __name__ == "__main__":
    main()
