"""Latency and throughput of a load test second by second, as a page of charts for locust."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from loadtest.charts import Dot, Line, chart, document
from loadtest.http_client import Completion

MAX_DOTS = 120  # per line; a longer test is shown in wider slices

Values = Callable[["Slice"], Sequence[float]]
Figure = Callable[[Sequence[float]], float | None]


@dataclass(slots=True)
class Slice:
    """The events of one second; durations are in seconds."""

    ttft: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    e2e: list[float] = field(default_factory=list)
    tokens: float = 0.0
    failed: int = 0

    def add(self, other: Slice) -> None:
        self.ttft += other.ttft
        self.gaps += other.gaps
        self.e2e += other.e2e
        self.tokens += other.tokens
        self.failed += other.failed


def quantile(share: float) -> Figure:
    def of(values: Sequence[float]) -> float | None:
        return sorted(values)[round(share * (len(values) - 1))] if values else None

    return of


P50, P99 = ("p50", quantile(0.5)), ("p99", quantile(0.99))
TIMES: tuple[tuple[str, Values], ...] = (
    ("Time to first token", lambda s: s.ttft),
    ("Between tokens", lambda s: s.gaps),
    ("Whole answer", lambda s: s.e2e),
)


class Timeline:
    """Completions, with each event sorted into the second in which it happened."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._slices: defaultdict[int, Slice] = defaultdict(Slice)

    def add(self, done: Completion) -> None:
        ended = self._at(done.ended)
        if done.error:
            ended.failed += 1
            return
        ended.e2e.append(done.ended - done.started)
        for number, at in enumerate(done.arrivals):
            within = self._at(at)
            within.tokens += done.tokens / len(done.arrivals)
            if number:
                within.gaps.append(at - done.arrivals[number - 1])
            else:
                within.ttft.append(at - done.started)

    def _at(self, moment: float) -> Slice:
        return self._slices[int(moment - self._began)]

    def slices(self) -> tuple[int, list[Slice]]:
        """Return (seconds per slice, all slices without gaps)."""
        length = max(self._slices, default=0) + 1
        width = -(-length // MAX_DOTS)
        wide = [Slice() for _ in range(-(-length // width))]
        for second, one in list(self._slices.items()):
            wide[second // width].add(one)
        return width, wide

    def page(self, title: str, notes: Sequence[str]) -> str:
        """Return an HTML document with the charts and `notes`."""
        width, slices = self.slices()

        def line(name: str, value: Callable[[Slice], float | None]) -> Line:
            known = [(i * width, v) for i, s in enumerate(slices) if (v := value(s)) is not None]
            return Line(name, [Dot(float(at), v) for at, v in known])

        figures = [
            chart("Output tokens", "/s", "seconds", [line("tokens", lambda s: s.tokens / width)],
                  every=False),
            chart("Answers", "/s", "seconds",
                  [line("whole", lambda s: len(s.e2e) / width),
                   line("failed", lambda s: s.failed / width)], every=False),
        ]  # fmt: skip
        for name, values in TIMES:
            lines = [
                line(label, lambda s, values=values, of=of: _ms(of(values(s))))  # type: ignore[misc]
                for label, of in (P50, P99)
            ]
            figures.append(chart(name, "ms", "seconds", lines, every=False))
        parts = [f"<h1>{escape(title)}</h1>", f'<div class="charts">{"".join(figures)}</div>']
        return document(title, parts + [f"<p>{escape(note)}</p>" for note in notes])

    def summary(self) -> dict[str, float | None]:
        """Return latencies over the whole test in milliseconds, and its tokens/s."""
        width, slices = self.slices()
        found: dict[str, float | None] = {
            "tokens_per_s": statistics.fmean(s.tokens for s in slices) / width
        }
        for name, values in TIMES:
            everything = [value for one in slices for value in values(one)]
            for label, of in (P50, P99):
                found[f"{name.lower()} {label}"] = _ms(of(everything))
        return found


def _ms(value: float | None) -> float | None:
    return None if value is None else value * 1e3
