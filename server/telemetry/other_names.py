"""The metrics under the names of other servers: see --metrics-compat."""

from __future__ import annotations

from prometheus_client.exposition import generate_latest

from server.telemetry.metrics import OtherNames
from server.telemetry.metrics_llamacpp import llamacpp_text
from server.telemetry.metrics_vllm import VllmNames

OTHER_NAMES: dict[str, OtherNames] = {
    "vllm": lambda source: generate_latest(VllmNames(source)),
    "llamacpp": llamacpp_text,
}
