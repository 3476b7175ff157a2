"""The duration of an engine step, fitted to the metrics of running servers.

All data come from /metrics, scraped regularly while a closed loop keeps the engine busy. The wall
time between two scrapes is then the time of the steps between them, including everything else that
runs on the same cores. The fit is therefore valid for the contention under which it was made.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

ROUNDS = 20  # of reweighting, which converges within a few
TERMS = ("step", "prefill_token", "decode_token", "context_token")


class StepTime(msgspec.Struct, frozen=True):
    """The seconds of a step, as a sum over its parts.

    `frontend` is the time a request spends outside the engine until the client has its first token.
    """

    step: float
    prefill_token: float
    decode_token: float
    context_token: float  # per token in the KV cache of running sequences
    frontend: float = 0.0

    def seconds(self, prefill_tokens: int, decode_tokens: int, context_tokens: int) -> float:
        return (
            self.step
            + self.prefill_token * prefill_tokens
            + self.decode_token * decode_tokens
            + self.context_token * context_tokens
        )


@dataclass(frozen=True, slots=True)
class Scrape:
    """Counters of one server at one time; `context` is a gauge, in tokens."""

    at: float
    steps: float
    prefill: float  # prompt tokens computed, without those found in the prefix cache
    decode: float
    context: float
    waited: float  # seconds from submission to first token, summed over all requests
    requests: float

    @classmethod
    def parse(cls, at: float, exposition: str) -> Scrape:
        samples: dict[str, float] = {}
        shape: dict[str, str] = {}
        for family in text_string_to_metric_families(exposition):
            for sample in family.samples:
                samples[sample.name.removeprefix("penstock:")] = sample.value
                if sample.name == "penstock:cache_config_info":
                    shape = sample.labels
        blocks, size = int(shape["num_gpu_blocks"]), int(shape["block_size"])
        waits = ("request_queue_time_seconds", "request_prefill_time_seconds")
        return cls(
            at=at,
            steps=samples["engine_step_seconds_count"],
            prefill=samples["prefix_cache_queries_total"] - samples["prefix_cache_hits_total"],
            # The first token of a request comes from its last prefill step, not from a decode.
            decode=samples["generation_tokens_total"] - samples[f"{waits[1]}_count"],
            context=samples["kv_cache_usage_perc"] * blocks * size,
            waited=sum(samples[f"{name}_sum"] for name in waits),
            requests=samples[f"{waits[1]}_count"],
        )


def fit(runs: Sequence[Sequence[Scrape]], ttft: Sequence[float]) -> StepTime:
    """Fit a StepTime by least squares to the times between scrapes.

    Each run is one server under one load. `ttft` has the seconds to first token that clients saw in
    all runs. Terms that come out negative are set to 0, as nothing makes a step shorter. Raises
    ValueError if there are too few intervals.
    """
    rows, seconds = [], []
    for run in runs:
        for before, after in itertools.pairwise(run):
            steps = after.steps - before.steps
            context = steps * (before.context + after.context) / 2
            parts = (steps, after.prefill - before.prefill, after.decode - before.decode, context)
            rows.append(parts)
            seconds.append(after.at - before.at)
    if len(rows) < 3 * len(TERMS) or not ttft:
        raise ValueError(
            f"{len(rows)} intervals between scrapes are too few; at least {3 * len(TERMS)} are "
            "needed, with at least one time to first token. Measure longer."
        )
    terms = dict(zip(TERMS, _balanced(np.array(rows, float), np.array(seconds)), strict=True))
    waited = sum(run[-1].waited - run[0].waited for run in runs)
    requests = sum(run[-1].requests - run[0].requests for run in runs)
    frontend = max(0.0, float(np.mean(ttft)) - waited / max(requests, 1))
    return StepTime(**terms, frontend=frontend)


def _balanced(features: np.ndarray, wall: np.ndarray) -> list[float]:
    """Solve least squares with weights 1 / expected time, as for counts (quasi-Poisson).

    The predicted times then add up to the measured times. Without weights, intervals in which a
    shared machine was fast, and which therefore have many steps, would dominate. The predicted
    times would be half of the true ones.
    """
    expected = wall
    for _ in range(ROUNDS):
        scale = 1 / np.sqrt(expected)
        found = _non_negative(features * scale[:, None], wall * scale)
        expected = np.maximum(features @ found, wall.mean() / 100)
    return [float(value) for value in found]


def _non_negative(features: np.ndarray, wall: np.ndarray) -> np.ndarray:
    """Solve least squares, dropping the most negative coefficient until none is negative."""
    kept = list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(features[:, kept], wall, rcond=None)
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]
    whole = np.zeros(features.shape[1])
    whole[kept] = found
    return whole
