"""All Prometheus series. Names after the prefix `penstock:` are vLLM's.

Each app has its own registry. Label values come from closed sets: the model's name, the engine's
number, and literals of this code. They never come from a request, key or client. Intervals are
differences of CLOCK_MONOTONIC stamps; see `Stamps` for the process that makes each of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, values
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from engine.client.interface import EngineClient
from engine.protocol.outputs import Admission, StepOutputs
from engine.protocol.ready import Ready
from server.telemetry.observer import AbortReason
from server.telemetry.token_series import TokenSeries
from server.text.deltas import CallOutcome

# Ignore PROMETHEUS_MULTIPROC_DIR, which container images of other servers set. A single process
# observes everything, and a later process with the same pid would read this one's files again.
values.ValueClass = values.MutexValue

# From 1 ms, because a small model answers that fast, to 1 h, because the queue may be long.
SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60),
    *(120, 300, 600, 1800, 3600),
)
STEP_SECONDS = (0.0005, *SECONDS[:15])
TOKENS = tuple(2**power for power in range(18))
CHOICES = (1, 2, 5, 10, 20, 50, 128)
PREEMPTIONS = (0, 1, 2, 5, 10, 20)


@dataclass(frozen=True, slots=True)
class Stamps:
    """When one sequence passed each stage, in CLOCK_MONOTONIC seconds.

    The engine stamps `admitted`, `first` (token) and `last` (token); the API process stamps the
    others.
    """

    arrival: float
    admitted: float
    first: float
    last: float
    ended: float  # the answer's text was complete


RUNNER_GAUGES = {  # measurements of the engine, by the names in EngineStats.gauges
    "engine_resident_memory_bytes": "RAM that the engine process holds, libraries included.",
    "engine_cpu_contention": (
        "Share of time that the engine's threads were runnable without a core, 0 to 1."
    ),
    "engine_cpu_contended": (
        "1 while contention makes the engine's threads sleep to wait for each other."
    ),
    "state_slots_held": "Slots of recurrent states that running sequences hold.",
    "state_slots_cached": "Slots of recurrent states that are snapshots, for later prompts.",
    "images_encoded": "Images that were encoded since the start.",
    "images_reused": "Images of requests that had been encoded for an earlier one.",
    "image_cache_bytes": "Memory of the embeddings of images, in use and kept for later.",
    "kv_store_hits": "KV blocks that came from --kv-cache-dir.",
    "kv_store_misses": "KV blocks of prompts that were neither in memory nor there.",
    "kv_store_writes": "KV blocks that were written there.",
    "kv_store_evictions": "Files that left for newer ones.",
    "kv_store_bytes": "Bytes of the files in --kv-cache-dir.",
    "kv_store_errors_disk_full": "Writes that failed because the disk was full.",
    "kv_store_errors_write": "Writes that failed for another reason.",
    "kv_store_errors_read": "Files that could not be read.",
    "kv_store_errors_damaged": "Files whose content was not what had been written.",
    "kv_store_errors_foreign": "Files that cannot be blocks of this model.",
}


class Metrics:
    """The metrics of one app, and the methods that record them."""

    def __init__(self, model_name: str, client: EngineClient, version: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name, "engine": "0"}
        self._last_step = 0
        self._make_histograms()
        self._make_counters()
        self._most_tokens = 0  # of a sequence
        self.tokens = TokenSeries(self._labels, STEP_SECONDS)
        self.registry.register(self.tokens)
        self.registry.register(EngineSeries(client, self._labels, version))
        ProcessCollector(registry=self.registry)
        client.step_listeners.append(self._on_step)

    def _histogram(self, name: str, text: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        family = Histogram(
            f"penstock:{name}", text, self._labels, registry=self.registry, buckets=buckets
        )
        return family.labels(**self._labels)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        names = (*self._labels, *labels)
        return Counter(f"penstock:{name}", text, names, registry=self.registry)

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Add a gauge whose value is read at each scrape."""
        family = Gauge(f"penstock:{name}", text, [*self._labels], registry=self.registry)
        family.labels(**self._labels).set_function(read)

    def _make_histograms(self) -> None:
        make = self._histogram
        self.time_to_first_token = make(
            "time_to_first_token_seconds", "Time from a request's arrival to its first token."
        )
        self._time_per_output_token = make(
            "request_time_per_output_token_seconds",
            "Mean time between the tokens of one answer.",
            STEP_SECONDS,
        )
        self._e2e = make("e2e_request_latency_seconds", "Time from arrival to the end of the text.")
        self._queue_time = make("request_queue_time_seconds", "Time from submission to admission.")
        self._image_encode_time = make(
            "request_image_encode_time_seconds",
            "Time that the encoder worked on images of a request; reused ones take none.",
        )
        self._prefill_time = make(
            "request_prefill_time_seconds", "Time from admission to first token."
        )
        self._decode_time = make("request_decode_time_seconds", "Time from first to last token.")
        self._inference_time = make(
            "request_inference_time_seconds",
            "Time from admission to last token: prefill and decode.",
        )
        self._step = make("engine_step_seconds", "Wall time of an engine step.", STEP_SECONDS)
        self._step_tokens = make("iteration_tokens", "Tokens computed by an engine step.", TOKENS)
        self._step_progress = make(
            "iteration_progress_tokens",
            "Prompt tokens computed by an engine step or found in the cache, and tokens generated.",
            TOKENS,
        )
        self._request_prompt_tokens = make(
            "request_prompt_tokens", "Prompt tokens of a request.", TOKENS
        )
        self.request_max_tokens = make(
            "request_params_max_tokens", "Maximum tokens allowed for one answer.", TOKENS
        )
        self._request_generation_tokens = make(
            "request_generation_tokens", "Tokens of one answer.", TOKENS
        )
        self.request_n = make("request_params_n", "Choices per prompt of a request.", CHOICES)
        self._request_preemptions = make(
            "request_num_preemptions", "Times that a sequence was preempted.", PREEMPTIONS
        )

    def _make_counters(self) -> None:
        make, labels = self._counter, self._labels
        self._requests = make("http_requests", "HTTP requests except probes, by status.", "status")
        self._prompt_tokens = make("prompt_tokens", "Prompt tokens computed or cached.").labels(
            **labels
        )
        self._step_sequences = make(
            "step_sequences", "Sequences of all engine steps together; one counts in each step."
        ).labels(**labels)
        self._longest = Gauge(
            "penstock:longest_sequence_tokens",
            "Most tokens that a sequence had since the start: prompt and answer.",
            [*labels],
            registry=self.registry,
        ).labels(**labels)
        self._success = make("request_success", "Sequences finished, by reason.", "finished_reason")
        self._aborts = make("aborts", "HTTP requests aborted before their end.", "reason")
        self._rejects = make("rejects", "Requests answered with an error, by error code.", "code")
        self._tool_calls = make("tool_calls", "Tool calls in answers, by what they are.", "result")
        # Create these series at 0: one that first appears at 1 has no increase, so an alert on it
        # would miss the first event.
        for outcome in get_args(CallOutcome):
            self._tool_calls.labels(**labels, result=outcome)
        for finished in ("stop", "length", "tool_calls"):
            self._success.labels(**labels, finished_reason=finished)
        for reason in get_args(AbortReason):
            self._aborts.labels(**labels, reason=reason)
        for status in ("200", "500", "503"):
            self._requests.labels(**labels, status=status)
        self._rejects.labels(**labels, code="server_overloaded")

    def _on_step(self, outputs: StepOutputs) -> None:
        if outputs.stats.step != self._last_step:  # some messages carry no new step
            self._last_step = outputs.stats.step
            self._step.observe(outputs.stats.step_seconds)
            stats = outputs.stats
            self._step_tokens.observe(stats.step_prefill_tokens + stats.step_decode_tokens)
            cached = sum(admission.cached_tokens for admission in outputs.admitted)
            generated = len(outputs.tokens)
            self._step_progress.observe(stats.step_prefill_tokens + cached + generated)
            ended = [token for token in outputs.tokens if token.finish is not None]
            self._step_sequences.inc(stats.running + len(ended) + len(outputs.embeddings))

    def request(self, status: int) -> None:
        """Count a finished HTTP request by the status in the access log."""
        self._requests.labels(**self._labels, status=str(status)).inc()

    def abort(self, reason: AbortReason) -> None:
        """Count an HTTP request that was aborted before its end."""
        self._aborts.labels(**self._labels, reason=reason).inc()

    def reject(self, code: str) -> None:
        """Count a request that was answered with an error.

        `code` must be a literal, from the server's error table or from the engine.
        """
        self._rejects.labels(**self._labels, code=code).inc()

    def begin(self, tokens: int, submitted: float, admission: Admission | None, at: float) -> None:
        """Record a computed prompt or text of `tokens` tokens, whose first output came at `at`.

        `submitted` and `at` are in CLOCK_MONOTONIC seconds.
        """
        self._prompt_tokens.inc(tokens)
        self._see_length(tokens)
        self._request_prompt_tokens.observe(tokens)
        if admission is not None:
            self._queue_time.observe(max(admission.at - submitted, 0.0))
            self._prefill_time.observe(at - admission.at)
            if admission.images_encoded:
                self._image_encode_time.observe(admission.encode_seconds)

    def finish(
        self, reason: str, stamps: Stamps, tokens: int, preemptions: int, length: int
    ) -> None:
        """Record one finished sequence with `tokens` generated tokens of `length` in all."""
        self._see_length(length)
        decode = stamps.last - stamps.first
        self._success.labels(**self._labels, finished_reason=reason).inc()
        self._decode_time.observe(decode)
        self._inference_time.observe(stamps.last - stamps.admitted)
        if tokens > 1:
            self._time_per_output_token.observe(decode / (tokens - 1))
        self._e2e.observe(max(stamps.ended - stamps.arrival, 0.0))
        self._request_generation_tokens.observe(tokens)
        self._request_preemptions.observe(preemptions)

    def _see_length(self, tokens: int) -> None:
        self._most_tokens = max(self._most_tokens, tokens)
        self._longest.set(self._most_tokens)

    def tool_call(self, outcome: CallOutcome) -> None:
        """Count a call of a finished answer, or a text that looked like one."""
        self._tool_calls.labels(**self._labels, result=outcome).inc()

    def embedded(self, arrival: float) -> None:
        """Record one encoded text; `arrival` is in CLOCK_MONOTONIC seconds."""
        self._success.labels(**self._labels, finished_reason="stop").inc()
        self._e2e.observe(max(time.monotonic() - arrival, 0.0))


class EngineSeries(Collector):
    """The engine's own counters and its description, read at each scrape."""

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
            (gauge, "kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", used),
            (gauge, "draining", "1 while only accepted requests are served.", draining),
            (gauge, "last_step_age_seconds", "Age of the last engine message; 0 if idle.", age),
            (counter, "prefix_cache_queries", "Prompt tokens looked up.", stats.prefix_queries),
            (counter, "prefix_cache_hits", "Prompt tokens found.", stats.prefix_hits),
            (counter, "spec_decode_num_drafts", "Runs of tokens drafted.", stats.drafts),
            (counter, "spec_decode_num_draft_tokens", "Tokens drafted.", stats.drafted),
            (
                counter,
                "spec_decode_num_accepted_tokens",
                "Drafted tokens that the model sampled too.",
                stats.drafted_right,
            ),
            (counter, "num_preemptions", "Sequences preempted.", stats.preemptions),
        ):
            yield self._series(kind, name, text, value)
        for name, text in RUNNER_GAUGES.items():
            if name in stats.gauges:  # absent if not measured on this machine
                yield self._series(gauge, name, text, stats.gauges[name])
        yield self._series(gauge, "build_info", "The running version.", 1, version=self._version)
        if info is not None:
            shape = {"block_size": str(info.block_size), "num_gpu_blocks": str(info.num_blocks)}
            yield self._series(gauge, "cache_config_info", "The KV cache.", 1, **shape)
            text = "Processes that compute the model together."
            yield self._series(gauge, "tensor_parallel_size", text, info.tensor_parallel_size)
            yield self._rank_memory(info)

    def _rank_memory(self, info: Ready) -> Metric:
        """Return the bytes that each rank holds, by their use."""
        labels = [*self._labels, "rank", "use"]
        text = "Device memory that a process of the model was found to hold after loading."
        series = GaugeMetricFamily("penstock:rank_memory_bytes", text, labels=labels)
        for rank, entries in enumerate((info.memory, *info.other_ranks)):
            for entry in entries:
                if entry.measured is not None:
                    own = [*self._labels.values(), str(rank), entry.name]
                    series.add_metric(own, entry.measured)
        return series

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
