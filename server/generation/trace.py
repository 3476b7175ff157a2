"""The trace of one finished generation, from the same stamps as its metrics."""

from __future__ import annotations

from collections.abc import Sequence

from server.generation.choice_record import ChoiceRecord, phases
from server.generation.events import Usage
from server.generation.prepare import PreparedRequest
from server.telemetry.tracing import Attributes, Phase, Trace


def trace_of(
    prepared: PreparedRequest,
    records: Sequence[ChoiceRecord],
    usage: Usage,
    error: str | None,
    now: float,
) -> Trace:
    """Return the trace of a request that ends `now`; `error` is the reason if it was aborted."""
    name = f"{prepared.options.operation} {prepared.model}"
    attributes = _attributes(prepared, records, usage)
    whole = Phase(name, prepared.arrival, now, attributes)
    parts = [phase for record in records for phase in phases(record, now)]
    return Trace(whole, parts, prepared.headers, error)


def _attributes(
    prepared: PreparedRequest, records: Sequence[ChoiceRecord], usage: Usage
) -> Attributes:
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
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
        "gen_ai.response.finish_reasons": [finish for finish in finishes if finish],
        "penstock.request_id": prepared.request_id,
    }
