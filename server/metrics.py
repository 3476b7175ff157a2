"""Every Prometheus series, in one file. Names after the prefix are vLLM's.

Each app has its own registry. Labels come from closed sets: the model's name, the engine's number,
and literals of this code; never a request, key or client. Intervals are differences of
CLOCK_MONOTONIC stamps, of which the engine makes all but the arrival.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, values
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.client import EngineClient
from engine.protocol import Admission, StepOutputs
from server.config import MetricsCompat
from server.metrics_vllm import VllmNames

# PROMETHEUS_MULTIPROC_DIR, which images of other servers set, is not about the one process that
# observes all of this: its files would be read again by the next process of the same id.
values.ValueClass = values.MutexValue

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


@dataclass(frozen=True, slots=True)
class Stamps:
    """When one sequence passed each stage, in CLOCK_MONOTONIC seconds.

    The engine stamps `admitted`, `first` and `last` (token), the API process the others.
    """

    arrival: float
    admitted: float
    first: float
    last: float
    ended: float  # the answer's text was complete


class Metrics:
    def __init__(
        self, model_name: str, client: EngineClient, version: str, compat: MetricsCompat = "none"
    ) -> None:
        self.registry = CollectorRegistry()
        self._compat = compat
        self._labels = {"model_name": model_name, "engine": "0"}
        self._last_step = 0
        self._make_histograms()
        self._make_counters()
        self.registry.register(EngineSeries(client, self._labels, version))
        ProcessCollector(registry=self.registry)
        client.on_step = self._on_step

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        family = Histogram(
            f"penstock:{name}", text, self._labels, registry=self.registry, buckets=buckets
        )
        return family.labels(**self._labels)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        names = (*self._labels, *labels)
        return Counter(f"penstock:{name}", text, names, registry=self.registry)

    def _make_histograms(self) -> None:
        make = self._histogram
        self.time_to_first_token = make(
            "time_to_first_token_seconds", "From the request's arrival to its first token."
        )
        self.inter_token_latency = make(
            "inter_token_latency_seconds",
            "Between two tokens of one sequence, by the engine's clock.",
            STEP_SECONDS,
        )
        self._time_per_output_token = make(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of one answer.",
            STEP_SECONDS,
        )
        self._e2e = make("e2e_request_latency_seconds", "From arrival to the end of the text.")
        self._queue_time = make("request_queue_time_seconds", "From submission to admission.")
        self._prefill_time = make("request_prefill_time_seconds", "Admission to first token.")
        self._decode_time = make("request_decode_time_seconds", "First token to last token.")
        self._inference_time = make(
            "request_inference_time_seconds", "Admission to last token: prefill and decode."
        )
        self._step = make("engine_step_seconds", "Wall time of an engine step.", STEP_SECONDS)
        self._step_tokens = make("iteration_tokens", "Tokens computed by an engine step.", TOKENS)
        self._request_prompt_tokens = make(
            "request_prompt_tokens", "Prompt tokens of a request.", TOKENS
        )
        self.request_max_tokens = make(
            "request_params_max_tokens", "Tokens an answer was allowed to have.", TOKENS
        )
        self._request_generation_tokens = make(
            "request_generation_tokens", "Tokens of one answer.", TOKENS
        )

    def _make_counters(self) -> None:
        make, labels = self._counter, self._labels
        self._requests = make("http_requests", "HTTP requests, but probes, by status.", "status")
        self._prompt_tokens = make("prompt_tokens", "Prompt tokens of started work.").labels(
            **labels
        )
        self.generation_tokens = make("generation_tokens", "Tokens generated.").labels(**labels)
        self._success = make("request_success", "Sequences finished, by reason.", "finished_reason")
        self._aborts = make("aborts", "HTTP requests cut before their end, by reason.", "reason")
        self._rejects = make("rejects", "Requests answered with an error, by its code.", "code")
        # A series that begins at 1 shows no increase, so alerts would miss the first of its kind.
        for finished in ("stop", "length"):
            self._success.labels(**labels, finished_reason=finished)
        for reason in get_args(AbortReason):
            self._aborts.labels(**labels, reason=reason)
        for status in ("200", "500", "503"):
            self._requests.labels(**labels, status=status)
        self._rejects.labels(**labels, code="server_overloaded")

    def _on_step(self, outputs: StepOutputs) -> None:
        if outputs.stats.step != self._last_step:  # messages also come without a step
            self._last_step = outputs.stats.step
            self._step.observe(outputs.stats.step_seconds)
            stats = outputs.stats
            self._step_tokens.observe(stats.step_prefill_tokens + stats.step_decode_tokens)

    def request(self, status: int) -> None:
        """An HTTP request is over; its status as the access log has it."""
        self._requests.labels(**self._labels, status=str(status)).inc()

    def abort(self, reason: AbortReason) -> None:
        self._aborts.labels(**self._labels, reason=reason).inc()

    def reject(self, code: str) -> None:
        """`code` is a literal of this program, in the server's error table or in the engine."""
        self._rejects.labels(**self._labels, code=code).inc()

    def begin(self, tokens: int, submitted: float, admission: Admission | None, at: float) -> None:
        """A prompt or text of so many tokens has been computed; its first output came at `at`."""
        self._prompt_tokens.inc(tokens)
        self._request_prompt_tokens.observe(tokens)
        if admission is not None:
            self._queue_time.observe(max(admission.at - submitted, 0.0))
            self._prefill_time.observe(at - admission.at)

    def finish(self, reason: str, stamps: Stamps, tokens: int) -> None:
        """One sequence has ended, with so many tokens."""
        decode = stamps.last - stamps.first
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self._decode_time.observe(decode)
        self._inference_time.observe(stamps.last - stamps.admitted)
        if tokens > 1:
            self._time_per_output_token.observe(decode / (tokens - 1))
        self._e2e.observe(max(stamps.ended - stamps.arrival, 0.0))
        self._request_generation_tokens.observe(tokens)

    def embedded(self, arrival: float) -> None:
        """A text has become a vector."""
        self._success.labels(**self._labels, finished_reason="stop").inc()
        self._e2e.observe(max(time.monotonic() - arrival, 0.0))

    def render(self) -> bytes:
        """The text exposition."""
        series = WithoutCreated(self.registry)
        text = generate_latest(series)
        if self._compat == "vllm":
            text += generate_latest(VllmNames(series))
        return text


class WithoutCreated(Collector):
    """Another collector's families without the moment each began to count, which the library adds
    as series of their own: that is process_start_time_seconds, some twenty times over."""

    def __init__(self, source: Collector) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            family.samples = [s for s in family.samples if not s.name.endswith("_created")]
            yield family


class EngineSeries(Collector):
    """What the engine counts itself, and what it is; read when somebody asks."""

    def __init__(self, client: EngineClient, labels: dict[str, str], version: str) -> None:
        self._client, self._labels, self._version = client, labels, version

    def collect(self) -> Iterator[Metric]:
        stats, info = self._client.stats, self._client.info
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        used = stats.blocks_held / max(stats.blocks_total, 1)
        draining, age = self._client.state == "draining", self._client.last_step_age()
        for kind, name, text, value in (
            (gauge, "num_requests_running", "Sequences in the running batch.", stats.running),
            (gauge, "num_requests_waiting", "Sequences in the waiting queue.", stats.waiting),
            (gauge, "kv_cache_usage_perc", "Share of KV blocks held, 0 to 1.", used),
            (gauge, "draining", "1 while accepted work ends and new work is refused.", draining),
            (gauge, "last_step_age_seconds", "Since the engine's last sign, with work.", age),
            (counter, "prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries),
            (counter, "prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits),
            (counter, "num_preemptions", "Sequences preempted.", stats.preemptions),
        ):
            yield self._series(kind, name, text, value)
        if (share := stats.cpu_contention) is not None:
            text = "Share of their time that the engine's threads queued for a core, 0 to 1."
            yield self._series(gauge, "engine_cpu_contention", text, share)
            text = "1 while that is so much that they sleep where they wait for each other."
            yield self._series(gauge, "engine_cpu_contended", text, stats.cpu_contended)
        yield self._series(gauge, "build_info", "The running version.", 1, version=self._version)
        if info is not None:
            shape = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}
            yield self._series(gauge, "cache_config_info", "The KV cache.", 1, **shape)

    def _series(
        self,
        kind: type[GaugeMetricFamily | CounterMetricFamily],
        name: str,
        text: str,
        value: float,
        **labels: str,
    ) -> Metric:
        labels = self._labels | labels
        series = kind(f"penstock:{name}", text, labels=[*labels])
        series.add_metric([*labels.values()], value)
        return series
