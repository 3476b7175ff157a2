"""Our series under the names of llama.cpp's server, for dashboards made for it.

This module counts nothing: it computes llama.cpp's values from our families at each scrape. They
have no labels, as in llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

OURS, THEIRS = "penstock:", "llamacpp:"
COPIED = {  # their counters that are one of our samples
    "tokens_predicted": "generation_tokens_total",
    "tokens_predicted_seconds": "request_decode_time_seconds_sum",
    "prompt_tokens_cached": "prefix_cache_hits_total",
    "prompt_seconds": "request_prefill_time_seconds_sum",
    "n_decode": "engine_step_seconds_count",
    "n_tokens_max": "longest_sequence_tokens",
    "spec_decode_num_drafts": "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens": "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens": "spec_decode_num_accepted_tokens_total",
}
GAUGES = {
    "requests_processing": "num_requests_running",
    "requests_deferred": "num_requests_waiting",
}


def llamacpp_text(source: Collector) -> bytes:
    """Return the series in Prometheus' text format.

    llama.cpp declares `n_tokens_max` a counter, without the `_total` that the library adds.
    """
    text = generate_latest(LlamaCppNames(source))
    return text.replace(b"n_tokens_max_total", b"n_tokens_max")


class LlamaCppNames(Collector):
    """The values of another collector that llama.cpp has too, under llama.cpp's names."""

    def __init__(self, source: Collector) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        found: dict[str, float] = {}
        for family in self._source.collect():
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        values = {name.removeprefix(OURS): value for name, value in found.items()}
        for name, ours in COPIED.items():
            yield _counter(name, f"The same as {OURS}{ours}.", values[ours])
        cached = values["prefix_cache_hits_total"]
        computed = max(values["prompt_tokens_total"] - cached, 0.0)
        yield _counter("prompt_tokens", "Prompt tokens that the cache did not hold.", computed)
        for name, ours in GAUGES.items():
            yield _gauge(name, f"The same as {OURS}{ours}.", values[ours])
        steps = values["engine_step_seconds_count"]
        busy = values["step_sequences_total"] / steps if steps else 0.0
        yield _gauge("n_busy_slots_per_decode", "Mean sequences of a step.", busy)
        generated = values["generation_tokens_total"] - values["request_decode_time_seconds_count"]
        for name, tokens, seconds in (
            ("prompt_tokens_seconds", computed, values["request_prefill_time_seconds_sum"]),
            ("predicted_tokens_seconds", generated, values["request_decode_time_seconds_sum"]),
        ):
            rate = max(tokens, 0.0) / seconds if seconds else 0.0
            yield _gauge(name, "Mean tokens per second of a request, since the start.", rate)


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{THEIRS}{name}", text, value=value)


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{THEIRS}{name}", text, value=value)
