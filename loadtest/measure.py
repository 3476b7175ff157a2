"""From completions to figures: percentiles, rates, goodput under a stated objective.

Definitions, as `vllm bench serve` has them: time to first token (ttft) from the send, or from the
intended arrival where there is one, to the first event with text; itl each gap between such
events; tpot of a request (last - first) / (tokens - 1); e2e to the end of the answer. Percentiles
interpolate linearly. Seconds everywhere.
"""

from __future__ import annotations

import re
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from loadtest.errors import BenchError
from loadtest.http_client import Completion

SLO_UNITS = {"ms": 1e-3, "s": 1.0}


class Slo(msgspec.Struct, frozen=True):
    """Most seconds a good request may take; None is no bound. `itl` bounds a request's tpot, the
    mean time between its tokens."""

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """`ttft=500ms,itl=50ms,e2e=10s`, each of which may be absent; raises BenchError."""
        bounds: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"(ttft|itl|e2e)=(\d+(?:\.\d+)?)(ms|s)", part.strip())
            if not match:
                raise BenchError(f"--slo: {part!r} is none of ttft=500ms, itl=50ms, e2e=10s.")
            bounds[match[1]] = float(match[2]) * SLO_UNITS[match[3]]
        return cls(**bounds)

    def __str__(self) -> str:
        bounds = msgspec.structs.asdict(self).items()
        return ", ".join(f"{name} ≤ {bound * 1e3:g} ms" for name, bound in bounds if bound)

    def met(self, measured: Measured) -> bool:
        figures = (
            (self.ttft, measured.ttft),
            (self.itl, measured.tpot),
            (self.e2e, measured.e2e),
        )
        return all(bound is None or (value or 0) <= bound for bound, value in figures)


@dataclass(frozen=True, slots=True)
class Measured:
    """A completion and when it should have been sent."""

    completion: Completion
    intended: float

    @property
    def ttft(self) -> float | None:
        """None of an answer without text."""
        arrivals = self.completion.arrivals
        return arrivals[0] - self.intended if arrivals else None

    @property
    def tpot(self) -> float | None:
        """None of an answer with less than two events: nothing to take a mean of."""
        done = self.completion
        if len(done.arrivals) < 2 or done.tokens < 2:
            return None
        return (done.arrivals[-1] - done.arrivals[0]) / (done.tokens - 1)

    @property
    def e2e(self) -> float:
        return self.completion.ended - self.intended


class Spread(msgspec.Struct, frozen=True):
    """Of some durations, in seconds."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    max: float


def spread(values: Iterable[float | None]) -> Spread | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    # `inclusive` is numpy's linear interpolation; it wants two values.
    cuts = statistics.quantiles(known * 2 if len(known) == 1 else known, n=100, method="inclusive")
    return Spread(
        count=len(known),
        mean=statistics.fmean(known),
        p50=cuts[49],
        p90=cuts[89],
        p99=cuts[98],
        max=max(known),
    )


class Load(msgspec.Struct, frozen=True):
    """What was asked of the server: `value` clients at a time, or `value` requests/s."""

    loop: Literal["closed", "open"]
    value: float
    share: float | None = None  # of saturation, where the rate was given so

    def __str__(self) -> str:
        if self.loop == "closed":
            return f"{self.value:g} client{'s' * (self.value != 1)}"
        share = f" ({self.share:.0%})" if self.share is not None else ""
        return f"{self.value:.3g} req/s{share}"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """One load for some seconds. Requests are those sent meanwhile, also where they end later."""

    load: Load
    round: int
    seconds: float
    requests: int
    completed: int
    rejected: int
    failed: dict[str, int]  # by kind
    messages: dict[str, str]  # of the first of each kind, and of the first rejection
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_per_s: float  # output tokens that came in these seconds, over them
    requests_per_s: float  # answered in these seconds
    goodput: float | None  # requests/s that kept the objective
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    reject: Spread | None  # how long a rejection took
    lateness: Spread | None  # of the client: sent after the intended arrival
    client_cpu: float  # of the client's process, as a share of one core


def point(
    load: Load,
    round_number: int,
    window: tuple[float, float],
    measured: Sequence[Measured],
    slo: Slo | None,
    client_cpu: float,
) -> Point:
    """The figures of what was sent within `window` (begin, end)."""
    begin, end = window
    seconds = end - begin
    whole = [m for m in measured if not m.completion.error]
    rejected = [m for m in measured if m.completion.error == "rejected"]
    failed = [m for m in measured if m.completion.error not in ("", "rejected")]
    ended = [m for m in whole if m.completion.ended <= end]
    # Of an open loop every arrival counts, however late it was answered: the objective says
    # whether that was good. A closed loop's last requests were never waited for.
    judged = whole if load.loop == "open" else ended
    return Point(
        load=load,
        round=round_number,
        seconds=seconds,
        requests=len(measured),
        completed=len(whole),
        rejected=len(rejected),
        failed=dict(Counter(_kind(m.completion) for m in failed)),
        messages={_kind(m.completion): m.completion.message for m in reversed(failed + rejected)},
        prompt_tokens=sum(m.completion.prompt_tokens for m in whole),
        cached_tokens=sum(m.completion.cached_tokens for m in whole),
        output_tokens=sum(m.completion.tokens for m in whole),
        tokens_per_s=sum(_tokens_until(m.completion, end) for m in measured) / seconds,
        requests_per_s=len(ended) / seconds,
        goodput=sum(map(slo.met, judged)) / seconds if slo else None,
        ttft=spread(m.ttft for m in whole),
        itl=spread(gap for m in whole for gap in m.completion.gaps),
        tpot=spread(m.tpot for m in whole),
        e2e=spread(m.e2e for m in whole),
        reject=spread(m.e2e for m in rejected),
        lateness=spread(m.completion.started - m.intended for m in measured)
        if load.loop == "open"
        else None,
        client_cpu=client_cpu,
    )


def _kind(done: Completion) -> str:
    return f"HTTP {done.status}" if done.error == "refused" else done.error


def _tokens_until(done: Completion, end: float) -> float:
    """Tokens that had come by `end`, each event holding equally many."""
    if not done.arrivals:
        return 0.0
    return done.tokens * sum(at <= end for at in done.arrivals) / len(done.arrivals)
