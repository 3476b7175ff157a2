"""Compute figures from completions: percentiles, rates, and goodput under an objective (SLO).

The definitions are those of `vllm bench serve`:

- ttft, time to first token: from the send (open loop: the intended arrival) to the first event with
  text;
- itl: each gap between such events;
- tpot of a request: (last event - first event) / (tokens - 1);
- e2e: from the same start as ttft to the end of the response.

Percentiles interpolate linearly. All times are in seconds.
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
    """Upper bounds in seconds for a good request; None means no bound.

    `itl` bounds a request's tpot, the mean time between its tokens.
    """

    ttft: float | None = None
    itl: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Slo:
        """Parse bounds like `ttft=500ms,itl=50ms,e2e=10s`; each is optional.

        Raises BenchError if a part is not a bound.
        """
        bounds: dict[str, float] = {}
        for part in text.split(","):
            match = re.fullmatch(r"(ttft|itl|e2e)=(\d+(?:\.\d+)?)(ms|s)", part.strip())
            if not match:
                raise BenchError(
                    f"--slo: {part!r} is not a bound; give bounds as ttft=500ms,itl=50ms,e2e=10s."
                )
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
    """A completion and its intended send time."""

    completion: Completion
    intended: float

    @property
    def ttft(self) -> float | None:
        """The time to first token, or None if the response has no text."""
        arrivals = self.completion.arrivals
        return arrivals[0] - self.intended if arrivals else None

    @property
    def tpot(self) -> float | None:
        """The mean time between tokens, or None with fewer than two events."""
        done = self.completion
        if len(done.arrivals) < 2 or done.tokens < 2:
            return None
        return (done.arrivals[-1] - done.arrivals[0]) / (done.tokens - 1)

    @property
    def e2e(self) -> float:
        return self.completion.ended - self.intended


class Spread(msgspec.Struct, frozen=True):
    """Statistics of a set of durations, in seconds."""

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
    # `inclusive` is numpy's linear interpolation; it needs at least two values.
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
    """The load on the server: `value` concurrent clients (closed) or `value` requests/s (open)."""

    loop: Literal["closed", "open"]
    value: float
    share: float | None = None  # of saturation, if the rate was given in percent

    def __str__(self) -> str:
        if self.loop == "closed":
            return f"{self.value:g} client{'s' * (self.value != 1)}"
        share = f" ({self.share:.0%})" if self.share is not None else ""
        return f"{self.value:.3g} req/s{share}"


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of one load over `seconds`. They cover all requests sent in this time.

    A request may end later.
    """

    load: Load
    round: int
    seconds: float
    requests: int
    completed: int
    rejected: int
    failed: dict[str, int]  # by kind
    messages: dict[str, str]  # the first message of each kind of failure, and of rejections
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    tokens_per_s: float  # output tokens that arrived within `seconds`, per second
    requests_per_s: float  # requests that completed within `seconds`, per second
    goodput: float | None  # requests/s that kept the objective
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    reject: Spread | None  # duration of rejections
    lateness: Spread | None  # delay of the client's sends after the intended arrivals
    client_cpu: float  # CPU time of the client's process, as a share of one core


def point(
    load: Load,
    round_number: int,
    window: tuple[float, float],
    measured: Sequence[Measured],
    slo: Slo | None,
    client_cpu: float,
) -> Point:
    """Return the figures of the requests sent within `window` (begin, end)."""
    begin, end = window
    seconds = end - begin
    whole = [m for m in measured if not m.completion.error]
    rejected = [m for m in measured if m.completion.error == "rejected"]
    failed = [m for m in measured if m.completion.error not in ("", "rejected")]
    ended = [m for m in whole if m.completion.ended <= end]
    # In an open loop every arrival counts, even if its response ended after the window: the
    # objective decides if it was good. In a closed loop, requests that end after the window do not
    # count.
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
    """Return the number of tokens that arrived by `end`, assuming equally many in each event."""
    if not done.arrivals:
        return 0.0
    return done.tokens * sum(at <= end for at in done.arrivals) / len(done.arrivals)
