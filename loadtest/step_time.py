"""How long a step of the engine takes, fitted to what running servers say of themselves.

Everything comes from /metrics, scraped each second of a closed loop that never lets the engine
rest: then the wall time between two scrapes is that of the steps between them, with all that goes
on around a step on the same cores. So the fit holds for the contention it was made under.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

ROUNDS = 20  # of reweighting; it settles within a few
TERMS = ("step", "prefill_token", "decode_token", "context_token")


class StepTime(msgspec.Struct, frozen=True):
    """Seconds of a step, a sum over its parts; `frontend` is what a request spends outside of the
    engine until its first token has reached the client."""

    step: float
    prefill_token: float
    decode_token: float
    context_token: float  # of KV that running sequences hold
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
    """Counters of one server at one moment; `context` is a gauge, of tokens."""

    at: float
    steps: float
    prefill: float  # prompt tokens computed, those found in the cache left out
    decode: float
    context: float
    waited: float  # seconds from submission to first token, over all requests
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
            # The step that ends a prompt samples its first token, too.
            decode=samples["generation_tokens_total"] - samples[f"{waits[1]}_count"],
            context=samples["kv_cache_usage_perc"] * blocks * size,
            waited=sum(samples[f"{name}_sum"] for name in waits),
            requests=samples[f"{waits[1]}_count"],
        )


def fit(runs: Sequence[Sequence[Scrape]], ttft: Sequence[float]) -> StepTime:
    """Least squares over the times between scrapes; each run is one server under one load.

    `ttft` are the seconds to first token that clients saw in all these runs together. A term that
    comes out negative is left out: nothing makes a step shorter. Raises ValueError for too little.
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
        raise ValueError(f"{len(rows)} intervals are too few; {3 * len(TERMS)} are the least.")
    terms = dict(zip(TERMS, _balanced(np.array(rows, float), np.array(seconds)), strict=True))
    waited = sum(run[-1].waited - run[0].waited for run in runs)
    requests = sum(run[-1].requests - run[0].requests for run in runs)
    frontend = max(0.0, float(np.mean(ttft)) - waited / max(requests, 1))
    return StepTime(**terms, frontend=frontend)


def _balanced(features: np.ndarray, wall: np.ndarray) -> list[float]:
    """Least squares in which a row weighs as 1 / its expected time, as for counts (quasi-Poisson).

    The times foretold then add up to those measured. Unweighted, the moments at which a shared
    machine was fast, and so many steps fell into one interval, would win: half the true times.
    """
    expected = wall
    for _ in range(ROUNDS):
        scale = 1 / np.sqrt(expected)
        found = _non_negative(features * scale[:, None], wall * scale)
        expected = np.maximum(features @ found, wall.mean() / 100)
    return [float(value) for value in found]


def _non_negative(features: np.ndarray, wall: np.ndarray) -> np.ndarray:
    """Least squares with the most negative coefficient left out until none is."""
    kept = list(range(features.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(features[:, kept], wall, rcond=None)
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]
    whole = np.zeros(features.shape[1])
    whole[kept] = found
    return whole
