"""The figures of one measurement, their medians, and what must be true of every answer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import psutil

from loadtest.peers.jobs import Job
from loadtest.peers.worker import Times


class Figures(NamedTuple):
    """One measurement of one contender. A value that was not measured is None."""

    rate: float  # output tokens/s of all streams together
    gap: float  # ms, median between a stream's tokens
    p99_gap: float  # ms
    ttft: float  # ms, median until the first token
    p99_ttft: float  # ms
    start: float | None = None  # s until the server is ready
    resident: float | None = None  # MB of all its processes, after the warm-up


Measure = Callable[[Job], Figures]


def figures(times: Times, job: Job) -> Figures:
    """Return the figures of a job.

    Raises RuntimeError if an answer is missing, or if an answer or a prompt has other tokens. A
    server that does not report the length of a prompt reports 0.
    """
    if len(times.tokens) != len(job.prompts):
        raise RuntimeError(f"{len(times.tokens)} answers to {len(job.prompts)} requests")
    if wrong := [count for count in times.tokens if count != job.new]:
        raise RuntimeError(f"{wrong[0]} tokens of output instead of {job.new}")
    length = len(job.prompts[0])
    if wrong := [count for count in times.prompt_tokens if count not in (0, length)]:
        raise RuntimeError(f"{wrong[0]} tokens of prompt instead of {length}")
    if not all(times.arrivals):
        raise RuntimeError("an answer has no event with text")
    gaps = [b - a for arrivals in times.arrivals for a, b in pairwise(arrivals)]
    pairs = zip(times.started, times.arrivals, strict=True)
    firsts = [arrivals[0] - started for started, arrivals in pairs]
    return Figures(
        sum(times.tokens) / times.wall,
        1e3 * statistics.median(gaps),
        1e3 * percentile(gaps, 99),
        1e3 * statistics.median(firsts),
        1e3 * percentile(firsts, 99),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """Return the smallest value that `percent` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * int(percent) // 100) - 1)]


def medians(rounds: Sequence[Figures]) -> Figures:
    """Return the median of each figure over the rounds."""
    columns = zip(*rounds, strict=True)
    return Figures(*(None if None in c else statistics.median(c) for c in columns))  # type: ignore[arg-type]


def resident_mb(pid: int) -> float:
    """Return the resident megabytes of a process and its descendants."""
    process = psutil.Process(pid)
    family = [process, *process.children(recursive=True)]
    return sum(each.memory_info().rss for each in family) / 1e6
