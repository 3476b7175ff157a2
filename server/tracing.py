"""OpenTelemetry spans of finished requests, behind the extra [otel].

A trace is made when a request is over, from the stamps the metrics observe: nothing is measured
twice, and nothing is done while tokens flow. Attributes are numbers, words of this program, the
model's name and the request's id; never the text of a prompt or an answer. Their names follow
OpenTelemetry's GenAI conventions (in development); ours begin with `penstock.`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

Attributes = Mapping[str, str | int | float | Sequence[str]]
PROTOCOL = "http/protobuf"
CLOSE_S = 2.0  # for the last spans to leave; a collector that is gone must not hold up the exit


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a request's time, in CLOCK_MONOTONIC seconds."""

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """One request. `headers` are the client's: they may name the trace it is part of."""

    whole: Phase
    phases: Sequence[Phase]
    headers: Mapping[str, str]
    error: str | None


class Tracing:
    """Turns Traces into spans for a processor of the SDK."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create()  # OTEL_SERVICE_NAME, OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "penstock"}))
        # OTEL_TRACES_SAMPLER says which traces are kept.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("penstock")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Tracing:
        """Over OTLP, to where the standard OTEL_EXPORTER_OTLP_* variables say. Raises ConfigError
        where the extra is not installed, or a variable asks for what it does not do."""
        for name, only in (
            ("OTEL_TRACES_EXPORTER", "otlp"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", PROTOCOL),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", PROTOCOL),
        ):
            if (value := environ.get(name) or only) != only:  # empty is unset, says the standard
                raise ConfigError(f"{name} is {value!r}; --tracing speaks {only} only.")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"--tracing needs OpenTelemetry's SDK, and {error.name} is not installed: "
                "pip install 'penstock[otel]', or leave the flag out."
            ) from error
        return cls(BatchSpanProcessor(OTLPSpanExporter()))

    def record(self, trace: Trace) -> None:
        """Makes the spans of one request."""
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        to_unix = time.time_ns() - time.monotonic_ns()

        def unix(seconds: float) -> int:
            return to_unix + round(seconds * 1e9)

        whole, parent = trace.whole, propagate.extract(trace.headers)
        root = self._tracer.start_span(
            whole.name, parent, SpanKind.SERVER, whole.attributes, start_time=unix(whole.start)
        )
        context = set_span_in_context(root)
        for phase in trace.phases:
            self._tracer.start_span(
                phase.name, context, attributes=phase.attributes, start_time=unix(phase.start)
            ).end(unix(phase.end))
        if trace.error is not None:
            root.set_attribute("error.type", trace.error)
            root.set_status(Status(StatusCode.ERROR))
        root.end(unix(whole.end))

    def close(self) -> None:
        """Sends what is left, for at most CLOSE_S. Blocks."""
        # The SDK's own limits are not kept by its exporter, so a thread waits for it.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
