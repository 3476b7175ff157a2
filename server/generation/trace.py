"""The trace of one finished generation, from the same stamps as its metrics."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from engine.protocol import Admission, PrefillChunk
from server.generation.choice import Choice
from server.generation.events import Usage
from server.generation.prepare import PreparedRequest
from server.generation.timings import Timeline
from server.telemetry.tracing import Attributes, Phase, Trace


@dataclass(frozen=True, slots=True)
class ChoiceRecord:
    """The facts about one choice at the end of its request."""

    choice: Choice
    submitted: float  # CLOCK_MONOTONIC seconds
    admission: Admission | None  # None: it never left the queue
    prefills: Sequence[tuple[float, float, PrefillChunk]]  # begin and end of the step, chunk
    timeline: Timeline


def trace_of(
    prepared: PreparedRequest, records: Sequence[ChoiceRecord], usage: Usage, error: str | None
) -> Trace:
    """Return the trace of a request that ends now; `error` is the reason if it was aborted."""
    now = time.monotonic()
    name = f"{prepared.options.operation} {prepared.model}"
    attributes = _attributes(prepared, records, usage)
    whole = Phase(name, prepared.arrival, now, attributes)
    phases = [phase for record in records for phase in _phases(record, now)]
    return Trace(whole, phases, prepared.headers, error)


def _attributes(
    prepared: PreparedRequest, records: Sequence[ChoiceRecord], usage: Usage
) -> Attributes:
    first = prepared.params[0]
    finishes = [record.choice.finish for record in records]
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


def _phases(record: ChoiceRecord, now: float) -> Iterator[Phase]:
    """Yield the phases of one choice up to the point it has reached."""
    choice = record.choice
    timeline = record.timeline
    which = {"penstock.choice": choice.index}
    admitted = now
    if record.admission is not None:
        admitted = record.admission.at
    yield Phase("queue", record.submitted, admitted, which)
    for begin, end, chunk in record.prefills:
        tokens = {"penstock.start": chunk.start, "penstock.tokens": chunk.count}
        yield Phase("prefill", begin, end, which | tokens)
    if choice.num_tokens:
        tokens = {"penstock.tokens": choice.num_tokens}
        yield Phase("decode", timeline.first_token, timeline.last_token, which | tokens)
        yield Phase("detokenise", timeline.last_token, timeline.text_end or now, which)
