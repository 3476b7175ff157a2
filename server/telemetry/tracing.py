"""OpenTelemetry spans of finished requests. Needs the extra [otel].

A trace is built when a request ends, from the same stamps that the metrics use. So nothing is
measured twice, and tracing does no work while tokens are generated.

Attributes are numbers, literals of this program, the model's name and the request's id. They never
contain the text of a prompt or an answer. Their names follow OpenTelemetry's GenAI conventions (in
development); our own names begin with `penstock.`.
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
# Time limit for sending the last spans: an unreachable collector must not delay the exit.
CLOSE_S = 2.0


@dataclass(frozen=True, slots=True)
class Phase:
    """A named interval of a request, in CLOCK_MONOTONIC seconds."""

    name: str
    start: float
    end: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Trace:
    """The phases of one request.

    `headers` are the client's; a `traceparent` there names the trace that the request belongs to.
    `error` is the reason of the failure, or None.
    """

    whole: Phase
    phases: Sequence[Phase]
    headers: Mapping[str, str]
    error: str | None


class Tracing:
    """Converts each Trace to spans and passes them to a span processor of the SDK."""

    def __init__(self, processor: SpanProcessor) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create()  # reads OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "penstock"}))
        # The provider reads OTEL_TRACES_SAMPLER, which selects the traces to keep.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("penstock")

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Tracing:
        """Return a Tracing that exports over OTLP, as the standard OTEL_EXPORTER_OTLP_* variables
        configure it.

        Raises ConfigError if the extra is not installed, or if a variable selects an unsupported
        exporter or protocol.
        """
        for name, only in (
            ("OTEL_TRACES_EXPORTER", "otlp"),
            ("OTEL_EXPORTER_OTLP_PROTOCOL", PROTOCOL),
            ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", PROTOCOL),
        ):
            if (value := environ.get(name) or only) != only:  # the standard treats "" as unset
                raise ConfigError(f"{name} is {value!r}; --tracing supports only {only}.")
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError as error:
            raise ConfigError(
                f"--tracing needs OpenTelemetry's SDK, and {error.name} is not installed: "
                "pip install 'penstock[otel]', or omit --tracing."
            ) from error
        return cls(BatchSpanProcessor(OTLPSpanExporter()))

    def record(self, trace: Trace) -> None:
        """Create and end the spans of one request."""
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
        """Send the remaining spans. Blocks for at most CLOSE_S seconds."""
        # The SDK's exporter can exceed the SDK's own time limits, so shut down in a thread.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_S)
