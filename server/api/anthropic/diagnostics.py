"""`diagnostics` of a message: how its prompt differs from that of an earlier one."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from server.api.anthropic.conversation import template_messages
from server.api.anthropic.schemas import MessagesBody
from server.api.prefixes.difference import MODEL, SYSTEM, TOOLS, Difference
from server.api.prefixes.inspection import Inspection

Json = dict[str, Any]
REASONS = {MODEL: "model_changed", TOOLS: "tools_changed", SYSTEM: "system_changed"}


def message_diagnostics(inspection: Inspection) -> Json:
    """Return the member of the answer. It is null if the prompt loses no cached block."""
    match inspection.finding:
        case Difference() as found:
            lost = {"cache_missed_input_tokens": found.lost_tokens}
            reason = {"type": _kind(found), **lost, **inspection.where}
        case "not_found":
            reason = {"type": "previous_message_not_found"}
        case "unavailable":
            reason = {"type": "unavailable"}
        case _:
            return {"diagnostics": None}
    return {"diagnostics": {"cache_miss_reason": reason}}


def _kind(found: Difference) -> str:
    """Return Anthropic's type. It has none for the options of a template."""
    if isinstance(found.held, int):
        return "messages_changed"
    return REASONS.get(found.held, "unavailable")


def name_of_message(body: MessagesBody, index: int) -> str:
    """Return the message of the request that begins the message `index` of the template."""

    def num_before(place: int) -> int:
        return len(template_messages(body.system, body.messages[:place]))

    # The first message begins what is behind the system message. One that is missing is the last.
    places = range(len(body.messages) + 1)
    return f"messages.{bisect_right(places, index, lo=1, key=num_before) - 1}"
