"""The trace of one finished generation, from the same stamps as its metrics."""

from __future__ import annotations

from server.generation.prepare import PreparedRequest
from server.telemetry.observer import Closed
from server.telemetry.phases import phases
from server.telemetry.tracing import Attributes, Phase, Trace


def trace_of(prepared: PreparedRequest, closed: Closed) -> Trace:
    """Return the trace of a request that has ended."""
    name = f"{prepared.options.operation} {prepared.model}"
    attributes = _attributes(prepared, closed)
    whole = Phase(name, prepared.arrival, closed.at, attributes)
    parts = [phase for record in closed.records for phase in phases(record, closed.at)]
    return Trace(whole, parts, prepared.headers, closed.reason)


def _attributes(prepared: PreparedRequest, closed: Closed) -> Attributes:
    records = closed.records
    first = prepared.params[0]
    finishes = [record.finish for record in records]
    return {
        "gen_ai.operation.name": prepared.options.operation,
        "gen_ai.provider.name": "penstock",
        "gen_ai.request.model": prepared.model,
        "gen_ai.response.model": prepared.model,
        "gen_ai.request.choice.count": len(records),
        "gen_ai.request.max_tokens": first.max_tokens,
        "gen_ai.request.temperature": first.temperature,
        "gen_ai.request.top_p": first.top_p,
        "gen_ai.usage.input_tokens": sum(map(len, prepared.prompts)),
        "gen_ai.usage.output_tokens": sum(record.num_tokens for record in records),
        "gen_ai.usage.cache_read.input_tokens": closed.cached_tokens,
        "gen_ai.response.finish_reasons": [finish for finish in finishes if finish],
        "penstock.request_id": prepared.request_id,
    }
