"""`diagnostics` of a message: how its prompt differs from that of an earlier one."""

from __future__ import annotations

from bisect import bisect_right
from typing import Any

from server.api.anthropic.conversation import template_messages
from server.api.anthropic.schemas import MessagesBody
from server.api.prefixes.difference import MODEL, SYSTEM, TOOLS, Difference
from server.api.prefixes.inspection import Finding

Json = dict[str, Any]
REASONS = {MODEL: "model_changed", TOOLS: "tools_changed", SYSTEM: "system_changed"}


def message_diagnostics(finding: Finding | None, body: MessagesBody) -> Json:
    """Return the member of the answer to `body`. It is null if the prompt loses no cached block."""
    match finding:
        case Difference():
            reason = _difference(finding, body)
        case "not_found":
            reason = {"type": "previous_message_not_found"}
        case "unavailable":
            reason = {"type": "unavailable"}
        case _:
            return {"diagnostics": None}
    return {"diagnostics": {"cache_miss_reason": reason}}


def _difference(found: Difference, body: MessagesBody) -> Json:
    """Return the reason of a miss. Options of the template have no type in Anthropic's API."""
    kind = "messages_changed"
    if isinstance(found.held, str):
        kind = REASONS.get(found.held, "unavailable")
    where = found.where(lambda index: f"messages.{_place(body, index)}")
    return {"type": kind, "cache_missed_input_tokens": found.lost_tokens, **where}


def _place(body: MessagesBody, index: int) -> int:
    """Return the message of the request that begins the message `index` of the template."""

    def num_before(place: int) -> int:
        return len(template_messages(body.system, body.messages[:place]))

    # The first message begins what is behind the system message. One that is missing is the last.
    places = range(len(body.messages) + 1)
    return bisect_right(places, index, lo=1, key=num_before) - 1
