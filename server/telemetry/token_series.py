"""The series that change with each token: plain numbers, which a scrape turns into families.

The library's own types take three times as long for each change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class TokenSeries(Collector):
    """The number of generated tokens, and a histogram of the times between them."""

    def __init__(self, labels: Mapping[str, str], bounds: Sequence[float]) -> None:
        """`bounds` are the upper bounds of the histogram's buckets in seconds, in order."""
        self._labels = labels
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # of each bucket; the last is unbounded
        self._sum = 0.0
        self._tokens = 0

    def add_token(self) -> None:
        self._tokens += 1

    def add_gap(self, seconds: float) -> None:
        """Record the time between two tokens of one sequence."""
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def collect(self) -> Iterator[Metric]:
        names, values = [*self._labels], [*self._labels.values()]
        tokens = CounterMetricFamily(
            "penstock:generation_tokens", "Tokens generated.", labels=names
        )
        tokens.add_metric(values, self._tokens)
        yield tokens
        gaps = HistogramMetricFamily(
            "penstock:inter_token_latency_seconds",
            "Time between two tokens of one sequence, by the engine's clock.",
            labels=names,
        )
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        up_to = accumulate(self._counts)
        gaps.add_metric(values, [*zip(bounds, up_to, strict=True)], self._sum)
        yield gaps
