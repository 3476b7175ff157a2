"""The report of `make bench-peers`: bounds, a table, a page with charts, and a JSON file."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from loadtest.bench_cpu import bound
from loadtest.charts import Dot, Line, chart, document
from loadtest.contenders import Load
from loadtest.peers.figures import Figures, medians
from loadtest.peers.jobs import Closed

OURS = "penstock"
IN_PROCESS = " (in process, no HTTP)"
Results = dict[str, dict[str, list[Figures]]]  # workload -> contender -> a round's figures


@dataclass
class Facts:
    """The circumstances of a run, to judge or repeat it. Rates are measured after each round."""

    command: str
    date: str
    processor: str
    dtype: str  # Penstock's choice on this CPU
    versions: dict[str, str]
    in_process: list[str]
    failed: dict[str, str]  # contender, or contender and workload -> reason
    gflops: list[float] = field(default_factory=list)  # bf16 matmul
    gbytes: list[float] = field(default_factory=list)  # read from memory, per second


def bounds(
    workloads: Mapping[str, Closed], config: Mapping[str, object], gflops: float, gbytes: float
) -> dict[str, float]:
    """Return the bounds in output tokens/s of closed loops without shared prompts."""
    limits = {}
    for name, one in workloads.items():
        if not one.shared:
            load = Load(one.prompt, one.new)
            limits[name] = bound(load, one.streams, gflops, gbytes, 2, config)
    return limits


def table(results: Results, limits: Mapping[str, float], in_process: Sequence[str] = ()) -> str:
    """Return a Markdown table. `limits` are the bounds in tokens/s by workload."""
    lines = [
        "| workload | contender | tokens/s | Penstock is | gap, p99 ms | first token, p99 ms "
        "| of the bound | start s | MB |",
        "|---" * 9 + "|",
    ]
    for workload, found in results.items():
        names = sorted(found, key=lambda name: name != OURS)
        middle = {name: medians(found[name]) for name in names}
        ours = middle.get(OURS)
        for name, one in middle.items():
            times = "" if name == OURS or ours is None else f"{ours.rate / one.rate:.2f} x"
            share = f"{one.rate / limits[workload]:.0%}" if workload in limits else ""
            start = "" if one.start is None else f"{one.start:.1f}"
            held = "" if one.resident is None else f"{one.resident:.0f}"
            gap, first = f"{one.gap:.1f}, {one.p99_gap:.0f}", f"{one.ttft:.0f}, {one.p99_ttft:.0f}"
            title = name + IN_PROCESS if name in in_process else name
            cells = [workload, title, f"{one.rate:.0f}", times, gap, first, share, start, held]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def picture(results: Results, closed: Mapping[str, Closed]) -> str:
    """Return a page with tokens/s and the time to the first token against the streams.

    Only workloads with short prompts are drawn.
    """
    drawn = []
    for title, unit, name_of_figure in (
        ("Output", "tokens/s", "rate"),
        ("Time to first token", "ms", "ttft"),
    ):
        lines: dict[str, list[Dot]] = {}
        for workload, found in results.items():
            if workload not in closed or closed[workload].prompt != 128:
                continue
            for name, rounds in found.items():
                value = getattr(medians(rounds), name_of_figure)
                dot = Dot(closed[workload].streams, value, f"{name}: {value:.0f} {unit}")
                lines.setdefault(name, []).append(dot)
        drawn.append(chart(title, unit, "streams", [Line(n, dots) for n, dots in lines.items()]))
    return document("Penstock and its peers", drawn)


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(": ")[2] for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else "unknown"


def commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def notes(facts: Facts) -> list[str]:
    """Return lines to print below the table: the rates of the bound, and what failed."""
    gflops, gbytes = statistics.median(facts.gflops), statistics.median(facts.gbytes)
    lines = [
        f"{facts.processor}, {facts.date}. bf16 matmul {gflops:.0f} GFLOP/s, memory read at "
        f"{gbytes:.1f} GB/s (medians of the run)."
    ]
    if facts.dtype != "bfloat16":
        lines.append(f"WARNING: on this CPU Penstock computes in {facts.dtype}, not in bfloat16.")
    return lines + [f"FAILED {which}: {why}" for which, why in facts.failed.items()]


def write(
    path: Path, facts: Facts, limits: Mapping[str, float], results: Results, page: str
) -> None:
    """Write the report as JSON, and its charts as a page of the same name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {w: {n: [r._asdict() for r in rs] for n, rs in f.items()} for w, f in results.items()}
    report = asdict(facts) | {"bounds": limits, "rows": rows}
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".html").write_text(page, encoding="utf-8")
