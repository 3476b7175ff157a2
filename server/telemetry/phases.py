"""The phases of a choice: what a trace and the page of a request show of its time."""

from __future__ import annotations

from collections.abc import Iterator

from server.telemetry.choice_record import ChoiceRecord
from server.telemetry.tracing import Phase


def phases(record: ChoiceRecord, now: float) -> Iterator[Phase]:
    """Yield the phases of one choice up to the point it had reached at the time `now`."""
    which = {"penstock.choice": record.index}
    admitted = now if record.admitted is None else record.admitted
    yield Phase("queue", record.submitted, admitted, which)
    images = record.admission
    if images is not None and images.encode_units:
        counts = {
            "penstock.images_encoded": images.images_encoded,
            "penstock.images_reused": images.images_reused,
            "penstock.encode_units": images.encode_units,
            "penstock.encode_seconds": images.encode_seconds,
        }
        yield Phase("encode images", images.encode_begin, images.images_ready, {**which, **counts})
    for begin, end, chunk in record.prefills:
        tokens = {"penstock.start": chunk.start, "penstock.tokens": chunk.count}
        yield Phase("prefill", begin, end, {**which, **tokens})
    if record.num_tokens:
        tokens = {"penstock.tokens": record.num_tokens}
        yield Phase("decode", record.first_token, record.last_token, {**which, **tokens})
        yield Phase("detokenise", record.last_token, record.text_end or now, which)
