"""Ids of responses and of their items.

An item's id contains the id of its response. So a reference to an item is found without an index.
"""

from __future__ import annotations

import re
import secrets

ITEM = re.compile(r"[a-z]{2,4}_([0-9a-f]{32})_(?:in)?[0-9]+")
PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "tool_search_call": "tsc",
    "tool_search_output": "tso",
    "additional_tools": "at",
}


def new_response_id() -> str:
    return f"resp_{secrets.token_hex(16)}"


def output_item_id(response_id: str, kind: str, place: int) -> str:
    """Return the id of item `place` of a response's output; `kind` is the item's type."""
    return f"{PREFIXES[kind]}_{response_id.removeprefix('resp_')}_{place}"


def input_item_id(response_id: str, kind: str, place: int) -> str:
    """Return the id of item `place` of a response's input; `kind` is the item's type."""
    return f"{PREFIXES[kind]}_{response_id.removeprefix('resp_')}_in{place}"


def response_of(item_id: str) -> str | None:
    """Return the id of the response that an item belongs to, or None for another server's id."""
    match = ITEM.fullmatch(item_id)
    return f"resp_{match[1]}" if match else None
