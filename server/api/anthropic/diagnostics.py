"""`diagnostics` of a message: how its prompt differs from that of an earlier one."""

from __future__ import annotations

from typing import Any

from server.api.prefixes.difference import MODEL, SYSTEM, TOOLS, Difference
from server.api.prefixes.inspection import Finding

Json = dict[str, Any]
REASONS = {MODEL: "model_changed", TOOLS: "tools_changed", SYSTEM: "system_changed"}


def message_diagnostics(finding: Finding | None) -> Json:
    """Return the member of the message. It is null if the prompt loses no cached block."""
    match finding:
        case Difference():
            reason = _difference(finding)
        case "not_found":
            reason = {"type": "previous_message_not_found"}
        case "unavailable":
            reason = {"type": "unavailable"}
        case _:
            return {"diagnostics": None}
    return {"diagnostics": {"cache_miss_reason": reason}}


def _difference(found: Difference) -> Json:
    """Return the reason of a miss. Options of the template have no type in Anthropic's API."""
    kind = REASONS.get(found.held, "unavailable")
    if found.held.startswith("messages."):
        kind = "messages_changed"
    return {"type": kind, "cache_missed_input_tokens": found.lost_tokens, **found.fields}
