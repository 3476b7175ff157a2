"""`prompt_cache_diagnostics`: how the prompt of a response differs from that of an earlier one."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from server.api.prefixes.difference import MODEL, SALT, TEMPLATE, TOOLS, Difference
from server.api.prefixes.inspection import Inspection
from server.api.responses.conversation import messages_of
from server.api.responses.schemas import ResponsesBody
from server.api.responses.turn import Turn

Json = dict[str, Any]
REASONS = {
    MODEL: "model_changed",
    SALT: "prompt_cache_key_changed",
    TOOLS: "tools_changed",
}


def cache_diagnostics(inspection: Inspection) -> Json | None:
    """Return the object as in OpenAI's API; None if nothing was compared."""
    match inspection.finding:
        case None:
            return None
        case Difference() as found:
            return {
                "type": "cache_miss",
                "reason": _reason(found),
                "cache_missed_tokens": found.lost_tokens,
                "comparison_reusable_tokens": found.reusable_tokens,
                **inspection.where,
            }
        case "hit":
            return {"type": "cache_hit"}
        case "not_found":
            return {"type": "comparison_response_not_found"}
        case "evicted":
            return {"type": "unavailable", "detail": "The cache does not hold the equal blocks."}
    return {"type": "unavailable"}


def _reason(found: Difference) -> str:
    """Return OpenAI's word. Messages and dates of the template are parts of the input there."""
    if found.held == TEMPLATE and found.changed_thinking:
        return "reasoning_effort_changed"
    if isinstance(found.held, int):
        return "input_changed"
    return REASONS.get(found.held, "input_changed")


def name_of_item(turn: Turn, body: ResponsesBody, index: int) -> str:
    """Return the item of the request that begins the message `index` of the template.

    A message before it belongs to the responses that the request continues.
    """

    def num_before(place: int) -> int:
        return len(messages_of(turn.earlier + turn.items[:place], body.instructions))

    places = range(len(turn.items) + 1)  # one that is missing is the last
    place = bisect_right(places, index, key=num_before) - 1
    return f"messages.{index}" if place < 0 else f"input.{place}"
