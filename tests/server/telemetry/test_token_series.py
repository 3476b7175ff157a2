"""TokenSeries: the same text as the library's own counter and histogram."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from server.telemetry.exposition import WithoutCreated
from server.telemetry.metrics import STEP_SECONDS
from server.telemetry.token_series import TokenSeries


def test_text_equals_that_of_the_librarys_types() -> None:
    labels = {"model_name": "m", "engine": "0"}
    ours = CollectorRegistry()
    series = TokenSeries(labels, STEP_SECONDS)
    ours.register(series)
    theirs = CollectorRegistry()
    name, text = "penstock:generation_tokens", "Tokens generated."
    tokens = Counter(name, text, labels, registry=theirs).labels(**labels)
    name = "penstock:inter_token_latency_seconds"
    text = "Time between two tokens of one sequence, by the engine's clock."
    gaps = Histogram(name, text, labels, registry=theirs, buckets=STEP_SECONDS).labels(**labels)
    rng = random.Random(0)
    for seconds in [0.0, *STEP_SECONDS, *(rng.expovariate(20) for _ in range(200)), 99.0]:
        series.add_token()
        tokens.inc()
        series.add_gap(seconds)
        gaps.observe(seconds)
    assert generate_latest(ours) == generate_latest(WithoutCreated(theirs))
