"""Writer of Anthropic's Messages API."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from server.api.anthropic.answer_blocks import ContentStream, joined_blocks
from server.generation.events import ChoiceEvents, Finish, FinishReason, Usage
from server.generation.prepare import PreparedRequest
from server.generation.sse import sse_event
from server.generation.writer import PING
from server.http.errors import ApiError
from server.text import exact_json

PATH = "/v1/messages"
STOP_REASONS: dict[FinishReason, str] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
}
Json = dict[str, Any]


class MessagesWriter:
    """Writes the one message that answers a request. The interface is `Writer`."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._prepared = prepared
        self._id = f"msg_{secrets.token_hex(16)}"
        self._content = ContentStream()
        self._finish: Finish | None = None

    def opening(self) -> bytes:
        """Return the empty message. Its usage is complete only in `closing`."""
        [prompt] = self._prepared.prompts
        usage = Usage(prompt_tokens=len(prompt), completion_tokens=0, cached_tokens=0)
        message = self._message([], usage)
        return _event({"type": "message_start", "message": message}) + _event({"type": "ping"})

    def chunks(self, update: ChoiceEvents) -> bytes:
        return b"".join(map(_event, self._stream_events(update)))

    def ping(self) -> bytes:
        return PING

    def closing(self, usage: Usage) -> bytes:
        delta = {"type": "message_delta", "delta": self._ending(), "usage": usage_fields(usage)}
        return _event(delta) + _event({"type": "message_stop"})

    def failure(self, error: ApiError) -> bytes:
        return sse_event(error.body(self._prepared.request_id, PATH), "error")

    def whole(self, answers: Sequence[ChoiceEvents], usage: Usage) -> bytes:
        [answer] = answers
        blocks = joined_blocks(self._stream_events(answer))
        return exact_json.dumps(self._message(blocks, usage))

    def _stream_events(self, update: ChoiceEvents) -> Iterator[Json]:
        for event in update.events:
            if isinstance(event, Finish):
                self._finish = event
            yield from self._content.push(event)

    def _message(self, blocks: Sequence[Json], usage: Usage) -> Json:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._prepared.model,
            "content": blocks,
            **self._ending(),
            "usage": usage_fields(usage),
        }

    def _ending(self) -> Json:
        """Return why the answer ended; null while it has not."""
        reason: str | None = None
        sequence: str | None = None
        if self._finish is not None:
            reason = STOP_REASONS[self._finish.reason]
            if self._finish.reason == "stop" and self._finish.stop is not None:
                reason = "stop_sequence"
                sequence = self._finish.stop
        return {
            "stop_reason": reason,
            "stop_sequence": sequence,
            "stop_details": None,
            "container": None,
        }


def usage_fields(usage: Usage) -> Json:
    """Return `usage` as in Anthropic's API, where input tokens are those not read from the cache.

    Nothing is charged for writing to the cache, so no input token counts as written. No field is
    null or missing: Anthropic's schema requires all of them, and its API fills them in this way.
    """
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 0},
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"thinking_tokens": usage.reasoning_tokens},
        "server_tool_use": {"web_search_requests": 0, "web_fetch_requests": 0},
        "service_tier": "standard",
        "inference_geo": "not_available",
    }


def _event(data: Json) -> bytes:
    """Return the server-sent event that has the name of its type."""
    return sse_event(orjson.dumps(data), data["type"])
