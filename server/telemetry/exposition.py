"""Exposition: the text of /metrics, in our names and perhaps those of another server."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from server.config import MetricsCompat
from server.telemetry.metrics_llamacpp import llamacpp_text
from server.telemetry.metrics_vllm import VllmNames

NAMES: dict[MetricsCompat, Callable[[Collector], bytes]] = {
    "vllm": lambda source: generate_latest(VllmNames(source)),
    "llamacpp": llamacpp_text,
}


class Exposition:
    """Writes the series of a registry. `compat` is the value of --metrics-compat."""

    def __init__(self, registry: Collector, compat: MetricsCompat = "none") -> None:
        self._series = WithoutCreated(registry)
        self._compat = compat
        self._rendered, self._rendered_at = b"", -math.inf
        self._started = int(time.time())

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """The response headers that clients of the other server's names read, in its spelling."""
        if self._compat != "llamacpp":
            return []
        return [(b"Process-Start-Time-Unix", str(self._started).encode())]

    def render(self, max_age: float = 0.0) -> bytes:
        """Return all series in Prometheus' text format, or what was returned `max_age` s before."""
        now = time.monotonic()
        if now - self._rendered_at > max_age:
            self._rendered, self._rendered_at = generate_latest(self._series), now
            if self._compat != "none":
                self._rendered += NAMES[self._compat](self._series)
        return self._rendered


class WithoutCreated(Collector):
    """Another collector's families without their `_created` series.

    The library adds one to each counter and histogram. They only repeat
    process_start_time_seconds.
    """

    def __init__(self, source: Collector) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family
