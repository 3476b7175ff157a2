"""Content blocks of an answer: events become the stream events of blocks, and these become blocks.

A whole answer joins the same stream events that a stream sends, so both are equal.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator
from typing import Any

from pydantic_core import from_json

from server.generation.events import (
    Event,
    Finish,
    PromptLogprobs,
    ReasoningDelta,
    TextDelta,
    ToolCallDelta,
)
from server.text import exact_json

# Clients verify no signature, but some drop thinking blocks without one.
SIGNATURE = "unsigned"
# Before the thoughts that a block leaves out, in base64. Clients send signatures back unchanged, so
# that the model reads its thoughts again.
THOUGHTS = "thoughts-"
DELTA_FIELDS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
Json = dict[str, Any]


class ContentStream:
    """The blocks of one answer while it grows. At most one is open, and none is empty."""

    def __init__(self, *, omits_thoughts: bool = False) -> None:
        self._omits_thoughts = omits_thoughts  # their text is only in the signature
        self._omitted: list[str] = []
        self._index = -1  # of the last block
        self._type: str | None = None  # of the open block

    def push(self, event: Event) -> Iterator[Json]:
        """Yield the stream events that `event` makes."""
        match event:
            case TextDelta(text=text):
                if text:
                    yield from self._text("text", text)
            case ReasoningDelta(text=text):
                if text:
                    yield from self._text("thinking", text)
            case ToolCallDelta():
                yield from self._call(event)
            case Finish():
                yield from self._close()
            case PromptLogprobs():
                pass  # no field of this API requests them

    def _text(self, kind: str, text: str) -> Iterator[Json]:
        """Yield a part of the text or the thoughts, in a block of its own kind."""
        if self._type != kind:
            block: Json = {"type": kind, kind: ""}
            if kind == "thinking":
                block["signature"] = ""
            yield from self._open(block)
        if kind == "thinking" and self._omits_thoughts:
            self._omitted.append(text)
        else:
            yield self._delta(f"{kind}_delta", text)

    def _call(self, part: ToolCallDelta) -> Iterator[Json]:
        """Yield a part of a call. The first one opens its block."""
        if part.name is not None:
            call: Json = {"type": "tool_use", "id": part.id, "name": part.name, "input": {}}
            call["caller"] = {"type": "direct"}
            yield from self._open(call)
        if part.arguments:
            yield self._delta("input_json_delta", part.arguments)

    def _open(self, block: Json) -> Iterator[Json]:
        yield from self._close()
        self._index += 1
        self._type = block["type"]
        yield {"type": "content_block_start", "index": self._index, "content_block": block}

    def _close(self) -> Iterator[Json]:
        if self._type is None:
            return
        if self._type == "thinking":
            yield self._delta("signature_delta", self._signature())
        yield {"type": "content_block_stop", "index": self._index}
        self._type = None

    def _signature(self) -> str:
        """Return the signature of the open block of thoughts."""
        if not self._omits_thoughts:
            return SIGNATURE
        thoughts = "".join(self._omitted)
        self._omitted.clear()
        return THOUGHTS + base64.b64encode(thoughts.encode()).decode()

    def _delta(self, kind: str, text: str) -> Json:
        delta = {"type": kind, DELTA_FIELDS[kind]: text}
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def thoughts_in(signature: str) -> str:
    """Return the thoughts that a block left out; "" if the signature holds none."""
    encoded = signature.removeprefix(THOUGHTS)
    if encoded == signature:
        return ""
    try:
        return base64.b64decode(encoded, validate=True).decode()
    except ValueError:
        return ""


def joined_blocks(stream_events: Iterable[Json]) -> list[Json]:
    """Return the blocks that a client makes of a stream."""
    blocks: list[Json] = []
    for event in stream_events:
        match event["type"]:
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
            case "content_block_delta":
                delta = event["delta"]
                field = DELTA_FIELDS[delta["type"]]
                blocks[-1][field] = blocks[-1].get(field, "") + delta[field]
            case "content_block_stop":
                if "partial_json" in blocks[-1]:
                    blocks[-1]["input"] = parsed_input(blocks[-1].pop("partial_json"))
    return blocks


def parsed_input(arguments: str) -> Json:
    """Return the arguments of a call as an object.

    Of a call that was cut, these are the complete members, as in Anthropic's clients.
    """
    found: Any = None
    try:
        found = exact_json.loads(arguments)
    except json.JSONDecodeError:
        found = _members_of_cut(arguments)
    return found if isinstance(found, dict) else {}


def _members_of_cut(arguments: str) -> Any:
    try:
        members = from_json(arguments, allow_partial=True)
        return exact_json.loads(json.dumps(members))
    except ValueError:
        return None
