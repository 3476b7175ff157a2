"""Every Prometheus series, in one file. Names after the prefix are vLLM's.

Each app has its own registry. Labels come from closed sets: the model's name, the engine's number,
and literals of this code; never a request, key or client. Intervals are differences of
CLOCK_MONOTONIC stamps, of which the engine makes all but the arrival.
"""

from __future__ import annotations

import time
from typing import Literal, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics import MetricWrapperBase

from engine.client import EngineClient
from engine.protocol import Ready, StepOutputs

AbortReason = Literal[
    "disconnect", "send_timeout", "engine", "shutdown", "rejected", "numerical", "internal"
]
# From 1 ms, because a small model answers in that, to an hour, because a queue may be long.
SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60),
    *(120, 300, 600, 1800, 3600),
)
STEP_SECONDS = (0.0005, *SECONDS[:15])
TOKENS = tuple(2**power for power in range(18))

Family = TypeVar("Family", bound=MetricWrapperBase)


class Metrics:
    def __init__(self, model_name: str, client: EngineClient, version: str) -> None:
        self.registry = CollectorRegistry()
        self._client = client
        self._labels = {"model_name": model_name, "engine": "0"}
        self._make_request_series()
        self._make_engine_series(version)
        ProcessCollector(registry=self.registry)
        client.on_step = self._on_step

    def _family(
        self, kind: type[Family], name: str, text: str, *labels: str, **more: object
    ) -> Family:
        names = (*self._labels, *labels)
        return kind(f"penstock:{name}", text, names, registry=self.registry, **more)  # type: ignore[arg-type]

    def _one(self, kind: type[Family], name: str, text: str, **more: object) -> Family:
        return self._family(kind, name, text, **more).labels(**self._labels)

    def _seconds(self, name: str, text: str) -> Histogram:
        return self._one(Histogram, f"{name}_seconds", text, buckets=SECONDS)

    def _make_request_series(self) -> None:
        self.time_to_first_token = self._seconds(
            "time_to_first_token", "From the request's arrival to its first token."
        )
        self.inter_token_latency = self._one(
            Histogram,
            "inter_token_latency_seconds",
            "Between two tokens of one sequence, by the engine's clock.",
            buckets=STEP_SECONDS,
        )
        self.e2e = self._seconds("e2e_request_latency", "From arrival to the last token.")
        self.queue_time = self._seconds("request_queue_time", "From submission to admission.")
        self.prefill_time = self._seconds("request_prefill_time", "Admission to first token.")
        self.decode_time = self._seconds("request_decode_time", "First token to last token.")
        self.request_prompt_tokens = self._one(
            Histogram, "request_prompt_tokens", "Prompt tokens of a request.", buckets=TOKENS
        )
        self.request_generation_tokens = self._one(
            Histogram, "request_generation_tokens", "Tokens of one answer.", buckets=TOKENS
        )
        self.prompt_tokens = self._one(Counter, "prompt_tokens", "Prompt tokens of started work.")
        self.generation_tokens = self._one(Counter, "generation_tokens", "Tokens generated.")
        self._success = self._family(
            Counter, "request_success", "Sequences finished, by reason.", "finished_reason"
        )
        self._aborts = self._family(
            Counter, "aborts", "HTTP requests cut before their end, by reason.", "reason"
        )
        self._rejects = self._family(
            Counter, "rejects", "Requests answered with an error, by its code.", "code"
        )
        for reason in ("stop", "length"):
            self._success.labels(**self._labels, finished_reason=reason)

    def _make_engine_series(self, version: str) -> None:
        client = self._client
        running = self._one(Gauge, "num_requests_running", "Sequences in the running batch.")
        running.set_function(lambda: client.stats.running)
        waiting = self._one(Gauge, "num_requests_waiting", "Sequences in the waiting queue.")
        waiting.set_function(lambda: client.stats.waiting)
        usage = self._one(Gauge, "kv_cache_usage_perc", "Share of KV blocks held, 0 to 1.")
        usage.set_function(lambda: client.stats.blocks_held / max(client.stats.blocks_total, 1))
        self._counters = {
            "prefix_queries": self._one(
                Counter, "prefix_cache_queries", "Prompt tokens looked up in the prefix cache."
            ),
            "prefix_hits": self._one(
                Counter, "prefix_cache_hits", "Prompt tokens found in the prefix cache."
            ),
            "preemptions": self._one(Counter, "num_preemptions", "Sequences preempted."),
        }
        self._last_step = 0
        self._seen = dict.fromkeys(self._counters, 0)
        self._step = self._one(
            Histogram, "engine_step_seconds", "Wall time of an engine step.", buckets=STEP_SECONDS
        )
        self._cache = self._family(
            Gauge, "cache_config_info", "The KV cache.", "block_size", "num_gpu_blocks"
        )
        build = self._family(Gauge, "build_info", "The running version.", "version")
        build.labels(**self._labels, version=version).set(1)

    def _on_step(self, outputs: StepOutputs) -> None:
        if outputs.stats.step != self._last_step:  # messages also come without a step
            self._last_step = outputs.stats.step
            self._step.observe(outputs.stats.step_seconds)

    def loaded(self, info: Ready) -> None:
        self._cache.labels(
            **self._labels, block_size=info.block_size, num_gpu_blocks=info.num_blocks
        ).set(1)

    def success(self, reason: str) -> None:
        self._success.labels(**self._labels, finished_reason=reason).inc()

    def abort(self, reason: AbortReason) -> None:
        self._aborts.labels(**self._labels, reason=reason).inc()

    def reject(self, code: str) -> None:
        """`code` is a literal of this program, in the server's error table or in the engine."""
        self._rejects.labels(**self._labels, code=code).inc()

    def finish(self, arrival: float, first: float, last: float, tokens: int) -> None:
        """One sequence has ended: its times since the HTTP request and its length."""
        self.decode_time.observe(last - first)
        self.e2e.observe(max(time.monotonic() - arrival, 0.0))
        self.request_generation_tokens.observe(tokens)

    def render(self) -> bytes:
        """The text exposition. The engine's counters are cumulative: their growth is added."""
        for name, counter in self._counters.items():
            value = int(getattr(self._client.stats, name))
            counter.inc(max(value - self._seen[name], 0))
            self._seen[name] = value
        return generate_latest(self.registry)
