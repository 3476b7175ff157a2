"""`prompt_cache_diagnostics`: how the prompt of a response differs from that of an earlier one."""

from __future__ import annotations

from typing import Any

from server.api.prefixes.difference import MODEL, SALT, TEMPLATE, TOOLS, Difference
from server.api.prefixes.inspection import Finding

Json = dict[str, Any]
REASONS = {
    MODEL: "model_changed",
    SALT: "prompt_cache_key_changed",
    TOOLS: "tools_changed",
}


def cache_diagnostics(finding: Finding | None) -> Json | None:
    """Return the object as in OpenAI's API; None if nothing was compared."""
    match finding:
        case None:
            return None
        case Difference():
            return {
                "type": "cache_miss",
                "reason": _reason(finding),
                "cache_missed_tokens": finding.lost_tokens,
                "comparison_reusable_tokens": finding.reusable_tokens,
                **finding.fields,
            }
        case "hit":
            return {"type": "cache_hit"}
        case "not_found":
            return {"type": "comparison_response_not_found"}
        case "evicted":
            return {"type": "unavailable", "detail": "The cache has dropped the equal blocks."}
    return {"type": "unavailable"}


def _reason(found: Difference) -> str:
    """Return OpenAI's word. Messages and dates of the template are parts of the input there."""
    if found.held == TEMPLATE and found.changed_thinking:
        return "reasoning_effort_changed"
    return REASONS.get(found.held, "input_changed")
