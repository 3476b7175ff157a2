"""Reports of `penstock bench`: as a JSON file, as a table, and compared side by side."""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from loadtest.errors import BenchError
from loadtest.measure import Load, Point, Slo, Spread

BUSY_CLIENT = 0.7  # of a core; above this, the client's own delays show in the latencies
LATE_CLIENT = 0.010  # seconds after the intended arrival, at the 90th percentile


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The report of one run, with everything needed to judge or repeat it."""

    version: int
    command: str
    date: str
    url: str
    model: str
    api: str
    workload: str
    arrivals: str
    left_out: int  # requests of the trace that exceed the model's context
    seed: int
    tokens_per_word: float
    slo: Slo | None
    client: dict[str, str | float]  # the client's machine: cores, load average, Python
    points: list[Point]
    stopped: str = ""  # why the run ended before all loads were measured


def check_target(path: Path) -> None:
    """Create the folder of `path` and check that the file can be written.

    Called before a measurement whose results would otherwise be lost. Raises BenchError.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        is_folder, there = path.is_dir(), path.exists()
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error}") from None
    if is_folder or not os.access(path if there else path.parent, os.W_OK):
        why = "it is a folder" if is_folder else "permission denied"
        raise BenchError(f"{path} cannot be written: {why}.")


def write(report: Report, path: Path) -> None:
    write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n", path)


def write_bytes(data: bytes, path: Path) -> None:
    """Write the file and create its folder. Raises BenchError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    except OSError as error:
        raise BenchError(f"{path} cannot be written: {error}") from None


def read(path: Path) -> Report:
    """Read a report. Raises BenchError if the file cannot be read or has another format."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except (OSError, msgspec.DecodeError) as error:
        raise BenchError(f"{path} is not a report of `penstock bench run`: {error}") from None


def by_load(points: Iterable[Point]) -> dict[Load, list[Point]]:
    """Return the rounds of each load, in the order in which they were measured.

    A share of saturation is one load, although each round measures its own saturation. The value of
    this load is the median over the rounds.
    """
    groups: dict[Load, list[Point]] = {}
    for point in points:
        load = point.load if point.load.share is None else replace(point.load, value=0.0)
        groups.setdefault(load, []).append(point)
    values = {load: statistics.median(p.load.value for p in groups[load]) for load in groups}
    return {replace(load, value=values[load]): points for load, points in groups.items()}


Figure = Callable[[Point], float | None]


def of(name: str, percentile: str) -> Figure:
    """Return a function that takes a percentile of a point's spread `name`, in seconds."""

    def figure(point: Point) -> float | None:
        value: Spread | None = getattr(point, name)
        return getattr(value, percentile) if value else None

    return figure


def median(points: Sequence[Point], figure: Figure) -> float | None:
    """Return the median over rounds, or None if no round has the figure."""
    values = [value for point in points if (value := figure(point)) is not None]
    return statistics.median(values) if values else None


def milliseconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value * 1e3:.1f}" if value < 0.1 else f"{value * 1e3:.0f}"


def rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def cached_share(point: Point) -> float | None:
    return point.cached_tokens / point.prompt_tokens if point.prompt_tokens else None


Column = tuple[str, Figure, Callable[[float | None], str]]  # title, figure, format
COLUMNS: tuple[Column, ...] = (
    ("done/s", lambda p: p.requests_per_s, rate),
    ("goodput/s", lambda p: p.goodput, rate),
    ("tokens/s", lambda p: p.tokens_per_s, rate),
    ("ttft p50", of("ttft", "p50"), milliseconds),
    ("p99", of("ttft", "p99"), milliseconds),
    ("itl p50", of("itl", "p50"), milliseconds),
    ("p99", of("itl", "p99"), milliseconds),
    ("e2e p50", of("e2e", "p50"), milliseconds),
    ("p99", of("e2e", "p99"), milliseconds),
    ("cached", cached_share, percent),
    ("rejected", lambda p: p.rejected, lambda v: f"{v or 0:g}"),
    ("in p50", of("reject", "p50"), milliseconds),
    ("p99", of("reject", "p99"), milliseconds),
    ("failed", lambda p: sum(p.failed.values()), lambda v: f"{v or 0:g}"),
    ("client", lambda p: p.client_cpu, percent),
)


def table(report: Report) -> str:
    """Return a table of the medians over the rounds; times are in milliseconds."""
    rows = [["load", *(title for title, _, _ in COLUMNS)]]
    for load, points in by_load(report.points).items():
        rows.append([str(load), *(show(median(points, figure)) for _, figure, show in COLUMNS)])
    return _aligned(rows)


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with aligned columns, which is also readable as plain text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ["-" * (width - 1) + ":" for width in widths]
    lines = [rows[0], rule, *rows[1:]]
    return "\n".join(
        "| " + " | ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) + " |"
        for line in lines
    )


def notes(report: Report) -> list[str]:
    """Return notes for readers of the table: failures, and warnings about a slow client."""
    lines = ["Times in ms, percentiles over requests (itl: over gaps)."]
    rounds = max((point.round for point in report.points), default=1)
    if report.stopped:
        lines.append(f"INCOMPLETE ({report.stopped}): only the loads that had ended are shown.")
    if rounds > 1:
        lines[0] += f" Medians of {rounds} rounds."
    if report.slo:
        lines.append(f"Goodput: requests/s with {report.slo}.")
    if report.left_out:
        lines.append(
            f"{report.left_out} requests of the trace exceed the model's context: left out."
        )
    told: set[str] = set()
    for point in report.points:
        for kind, message in point.messages.items():
            if kind not in told:
                told.add(kind)
                lines.append(f"First {kind}, at {point.load}: {message}")
    if (worst := max((p.client_cpu for p in report.points), default=0)) > BUSY_CLIENT:
        lines.append(
            f"WARNING: this client used up to {worst:.0%} of a core, so the latencies include its "
            "own delays. Lower the load, or run several clients."
        )
    late = [p.lateness.p90 for p in report.points if p.lateness]
    if late and max(late) > LATE_CLIENT:
        lines.append(
            f"WARNING: this client sent requests up to {max(late) * 1e3:.0f} ms (p90) late, as its "
            "machine was busy. The latencies shown include this delay."
        )
    return lines


COMPARED: tuple[Column, ...] = (
    *COLUMNS[:3],
    *(
        (f"{name} {percentile} ms", of(name, percentile), milliseconds)
        for name in ("ttft", "itl", "e2e")
        for percentile in ("p50", "p99")
    ),
)


def compare(a: Report, b: Report) -> str:
    """Return both runs' figures for each load that they have in common.

    Loads match if they have the same number of clients, the same rate or the same share of
    saturation. Raises BenchError if no load matches.
    """
    ours, theirs = ({_asked(load): p for load, p in by_load(r.points).items()} for r in (a, b))
    common = [asked for asked in ours if asked in theirs]
    if not common:
        names = (", ".join(side) for side in (ours, theirs))
        raise BenchError("The two runs have no load in common: {} and {}.".format(*names))
    parts = [_differences(a, b)] if a.workload != b.workload or a.slo != b.slo else []
    for asked in common:
        rows = [[asked, "A", "B", "B/A", "A's rounds", "B's rounds"]]
        for title, figure, show in COMPARED:
            left, right = median(ours[asked], figure), median(theirs[asked], figure)
            if left is None and right is None:
                continue
            ratio = f"{right / left:.2f}" if left and right is not None else "-"
            between = (_range(side[asked], figure, show) for side in (ours, theirs))
            rows.append([title, show(left), show(right), ratio, *between])
        parts.append(_aligned(rows))
    return "\n\n".join(parts)


def _asked(load: Load) -> str:
    return f"{load.share:.0%} of saturation" if load.share is not None else str(load)


def _differences(a: Report, b: Report) -> str:
    return (
        "WARNING: the two runs are different tests. "
        f"A: workload {a.workload}, objective {a.slo or 'none'}; "
        f"B: workload {b.workload}, objective {b.slo or 'none'}."
    )


def _range(points: Sequence[Point], figure: Figure, show: Callable[[float | None], str]) -> str:
    values = [value for point in points if (value := figure(point)) is not None]
    return f"{show(min(values))} to {show(max(values))}" if len(values) > 1 else ""
