"""`prompt_progress` of a stream, as llama.cpp's server has it."""

from __future__ import annotations

from typing import Any

from server.api.openai.timings import timing_fields
from server.generation.events import ChoiceEvents, PromptProgress, Timings
from server.http.errors import unsupported
from server.state import AppState


def check_progress(state: AppState, wanted: bool | None) -> None:
    """Raise a 400 ApiError if the engine does not report its steps on this model's prompts."""
    if wanted and state.start_token is not None:
        message = "return_progress is not supported for encoder-decoders."
        raise unsupported("return_progress", message)


def progress_of(update: ChoiceEvents, *, with_timings: bool) -> list[dict[str, Any]]:
    """Return the fields of each report about a prompt in an update."""
    found = []
    for event in update.events:
        if not isinstance(event, PromptProgress):
            continue
        fields: dict[str, Any] = {
            "prompt_progress": {
                "total": event.total,
                "cache": event.cached,
                "processed": event.processed,
                "time_ms": round(event.prompt_ms, 3),
            }
        }
        if with_timings:
            computed = event.processed - event.cached
            timings = Timings(0.0, event.cached, computed, event.prompt_ms, 0, 0.0, 0)
            fields["timings"] = timing_fields(timings)
        found.append(fields)
    return found
