"""Our series under vLLM's names, for dashboards, autoscalers and endpoint pickers made for vLLM.

This module counts nothing: it copies our families at each scrape. Ours are named after vLLM's, so
most names differ only in the prefix. The labels `model_name`, `engine` and `finished_reason` are
the same as vLLM's; the buckets are ours. The reason `abort` is missing: aborted requests are in
`penstock:aborts_total`.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

OURS, THEIRS = "penstock:", "vllm:"
SAME = (
    *("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "cache_config_info"),
    *("prompt_tokens", "generation_tokens", "prefix_cache_queries", "prefix_cache_hits"),
    *("spec_decode_num_drafts", "spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens"),
    *("num_preemptions", "request_success", "time_to_first_token_seconds"),
    *("inter_token_latency_seconds", "request_time_per_output_token_seconds"),
    *("e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds"),
    *("request_decode_time_seconds", "request_inference_time_seconds"),
    *("request_prompt_tokens", "request_generation_tokens", "request_params_max_tokens"),
    *("request_params_n", "request_num_preemptions"),
)
RENAMED = {f"{OURS}{name}": f"{THEIRS}{name}" for name in SAME}
# Theirs is a histogram. Its sum is that of prompt_tokens_total and generation_tokens_total.
RENAMED[f"{OURS}iteration_progress_tokens"] = f"{THEIRS}iteration_tokens_total"


class VllmNames(Collector):
    """The families of another collector that vLLM has too, under vLLM's names."""

    def __init__(self, source: Collector) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            if name := RENAMED.get(family.name):
                yield _renamed(family, name)
            if family.name == f"{OURS}num_requests_waiting":
                yield _waiting_by_reason(family)
            if family.name == f"{OURS}aborts":
                yield _only(family, "reason", "numerical", "corrupted_requests")
            if family.name == f"{OURS}rejects":
                yield _only(family, "code", "server_overloaded", "admission_rejections")


def _renamed(family: Metric, name: str) -> Metric:
    """Return a copy of `family` under another name."""
    copy = Metric(name, f"{family.documentation} The same as {family.name}.", family.type)
    for sample in family.samples:
        copy.samples.append(sample._replace(name=sample.name.replace(family.name, name, 1)))
    return copy


def _waiting_by_reason(family: Metric) -> Metric:
    """Return vLLM's count of waiting requests by reason.

    Here every request waits for `capacity`. In vLLM `deferred` requests wait for KV from elsewhere.
    """
    name = f"{THEIRS}num_requests_waiting_by_reason"
    copy = Metric(name, f"The same as {family.name}; all wait for capacity.", family.type)
    for sample in family.samples:
        for reason, value in (("capacity", sample.value), ("deferred", 0.0)):
            copy.add_sample(name, {**sample.labels, "reason": reason}, value)
    return copy


def _only(family: Metric, label: str, value: str, name: str) -> Metric:
    """Return vLLM's counter `name`: ours where `label` has one value, without that label."""
    name = f"{THEIRS}{name}"
    copy = Metric(name, f'The same as {family.name} with {label}="{value}".', family.type)
    for sample in family.samples:
        labels = dict(sample.labels)
        if sample.name.endswith("_total") and labels.pop(label) == value:
            copy.add_sample(f"{name}_total", labels, sample.value)
    return copy
