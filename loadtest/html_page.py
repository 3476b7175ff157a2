"""A report of `penstock bench run` as one self-contained HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

from loadtest import report as reports
from loadtest.charts import Dot, Line, chart, document
from loadtest.measure import Load, Point
from loadtest.report import Figure, Report, by_load, median, of, write_bytes

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
    *(
        (title, "ms", 1e3, tuple((p, of(name, p)) for p in ("p50", "p90", "p99")))
        for title, name in (
            ("Time to first token", "ttft"),
            ("Between tokens", "itl"),
            ("Whole answer", "e2e"),
        )
    ),
    ("The client's own CPU", "% of a core", 100, (("client", lambda p: p.client_cpu),)),
)


def page(report: Report) -> str:
    """Return the report as an HTML document."""
    groups = by_load(report.points)
    parts = [
        f"<h1>{escape(report.model)}: load test</h1>",
        f"<p>{escape(report.date)} · {escape(report.url)} · workload {escape(report.workload)} · "
        f"arrivals {escape(report.arrivals)}</p>",
    ]
    for loop, title, axis in (
        ("open", "Open loop: latency from the intended arrival", "requests/s sent"),
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
    return document(report.model, parts)


def write(report: Report, path: Path) -> None:
    """Write the page. Raises BenchError if the file cannot be written."""
    write_bytes(page(report).encode(), path)


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
    figures: Sequence[tuple[str, Figure]],
) -> str:
    """Return a chart with lines through the medians of each load, and a dot for every round."""
    loads = sorted(groups, key=lambda load: load.value)
    lines = []
    for name, figure in figures:
        medians = [
            Dot(load.value, value * factor, f"{name} at {load}: {value * factor:.4g} {unit}")
            for load in loads
            if (value := median(groups[load], figure)) is not None
        ]
        rounds = [
            Dot(load.value, value * factor)
            for load in loads
            for point in groups[load]
            if (value := figure(point)) is not None
        ]
        lines.append(Line(name, medians, rounds))
    return chart(title, unit, axis, lines)
