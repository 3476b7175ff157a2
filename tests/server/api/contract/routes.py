"""The routes that generate text, each in the words of its API."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx2

from tests.support.rig import (
    Served,
    check_anthropic_error_body,
    check_error_body,
    check_ollama_error_body,
)
from tests.support.served_paths import served_paths

Body = dict[str, Any]
MESSAGES = [{"role": "user", "content": "Hi"}]


@dataclass(frozen=True)
class Usage:
    """The tokens of an answer, as it counts them."""

    prompt: int
    cached: int
    generated: int


@dataclass(frozen=True)
class Route:
    """How a route is called, and where its answer has what every answer has.

    `whole` functions read the body of an answer, `stream` functions all events of a stream.
    """

    name: str
    path: str
    body: Body
    limit: str  # the field that limits the tokens of the answer
    text: Callable[[Body], str]
    streamed_text: Callable[[Sequence[Body]], str]
    usage: Callable[[Body], Usage]
    streamed_usage: Callable[[Sequence[Body]], Usage]
    reason: Callable[[Body], str]  # why the answer ended
    cut: str  # the reason of an answer that has reached its limit
    is_last: Callable[[Body], bool]  # the event that ends a complete stream
    usage_fields: Mapping[str, Any] = field(default_factory=dict)  # ask for usage in a stream
    is_anthropic: bool = False
    is_ollama: bool = False  # streams are lines of JSON
    has_done: bool = False  # complete streams end with "[DONE]"

    async def post(self, served: Served, **fields: Any) -> httpx2.Response:
        """Send "Hi" with these fields; `limit` stands for the route's own field."""
        if "limit" in fields:
            fields[self.limit] = fields.pop("limit")
        if self.is_ollama:
            options = {name: fields.pop(name) for name in (self.limit, "stop") if name in fields}
            fields |= {"options": options} if options else {}
        return await served.http.post(self.path, json={**self.body, **fields})

    def check_error(self, body: Body, status: int, code: str) -> None:
        """Check an error, which the API has as a body or as an event of a stream."""
        if self.is_ollama:
            check_ollama_error_body(body, status)
        elif self.is_anthropic:  # its errors have types only
            check_anthropic_error_body(body, status)
        elif "error" in body:
            check_error_body(body, status)
            assert body["error"]["code"] == code
        else:  # the error event of /v1/responses
            assert (body["type"], body["code"]) == ("error", code)


def events(response: httpx2.Response) -> tuple[list[Body], bool]:
    """Return the events of a stream, and whether it ended with "[DONE]". Checks the framing."""
    assert response.status_code == 200, response.text
    if response.headers["content-type"] == "application/x-ndjson":
        assert response.text.endswith("\n")
        return [json.loads(line) for line in response.text.split("\n")[:-1]], False
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    return parsed_events(response.text)


def parsed_events(text: str) -> tuple[list[Body], bool]:
    """Return the events of the text of a stream, and whether it ended with "[DONE]"."""
    assert text.endswith("\n\n")
    found: list[Any] = []
    for event in text[:-2].split("\n\n"):
        if event.startswith(":"):  # a ping
            continue
        *names, data = event.split("\n")
        assert data.startswith("data: ")
        found.append(data[6:] if data == "data: [DONE]" else json.loads(data[6:]))
        assert names == ([f"event: {found[-1]['type']}"] if names else [])
    is_done = found[-1] == "[DONE]"
    return found[: len(found) - is_done], is_done


def is_error(event: Body) -> bool:
    return bool(event.get("error")) or event.get("type") == "error"


# ---- OpenAI's chat completions and completions -----------------------------------------------


def _choices(events: Sequence[Body]) -> list[Body]:
    return [choice for event in events for choice in event.get("choices", [])]


def _openai_usage(body: Body) -> Usage:
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Usage(usage["prompt_tokens"], cached, usage["completion_tokens"])


def _chat(name: str, path: str) -> Route:
    return Route(
        name,
        path,
        {"messages": MESSAGES},
        "max_tokens",
        text=lambda body: body["choices"][0]["message"]["content"],
        streamed_text=lambda events: "".join(
            choice["delta"].get("content") or "" for choice in _choices(events)
        ),
        usage=_openai_usage,
        streamed_usage=lambda events: _openai_usage(events[-1]),
        reason=lambda body: body["choices"][0]["finish_reason"],
        cut="length",
        is_last=lambda event: event["choices"][0]["finish_reason"] is not None,
        usage_fields={"stream_options": {"include_usage": True}},
        has_done=True,
    )


def _completions(name: str, path: str) -> Route:
    return Route(
        name,
        path,
        {"prompt": "Hi"},
        "max_tokens",
        text=lambda body: body["choices"][0]["text"],
        streamed_text=lambda events: "".join(choice["text"] for choice in _choices(events)),
        usage=_openai_usage,
        streamed_usage=lambda events: _openai_usage(events[-1]),
        reason=lambda body: body["choices"][0]["finish_reason"],
        cut="length",
        is_last=lambda event: event["choices"][0]["finish_reason"] is not None,
        usage_fields={"stream_options": {"include_usage": True}},
        has_done=True,
    )


# ---- OpenAI's responses ----------------------------------------------------------------------


def _responses_text(body: Body) -> str:
    parts = [part for item in body["output"] for part in item["content"]]
    return "".join(part["text"] for part in parts)


def _responses_usage(body: Body) -> Usage:
    usage = body["usage"]
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Usage(usage["input_tokens"], cached, usage["output_tokens"])


def _responses_reason(body: Body) -> str:
    details = body["incomplete_details"]
    return str(details["reason"] if details else body["status"])


def _responses(name: str, path: str) -> Route:
    return Route(
        name,
        path,
        {"input": "Hi"},
        "max_output_tokens",
        text=_responses_text,
        streamed_text=lambda events: "".join(
            event["delta"] for event in events if event["type"] == "response.output_text.delta"
        ),
        usage=_responses_usage,
        streamed_usage=lambda events: _responses_usage(events[-1]["response"]),
        reason=_responses_reason,
        cut="max_output_tokens",
        is_last=lambda event: event["type"] in ("response.completed", "response.incomplete"),
    )


# ---- Anthropic's messages --------------------------------------------------------------------


def _messages_usage(usage: Body) -> Usage:
    cached = usage["cache_read_input_tokens"]
    return Usage(usage["input_tokens"] + cached, cached, usage["output_tokens"])


MESSAGES_ROUTE = Route(
    "messages",
    "/v1/messages",
    {"messages": MESSAGES, "max_tokens": 100},
    "max_tokens",
    text=lambda body: "".join(block["text"] for block in body["content"]),
    streamed_text=lambda events: "".join(
        event["delta"]["text"] for event in events if event["type"] == "content_block_delta"
    ),
    usage=lambda body: _messages_usage(body["usage"]),
    streamed_usage=lambda events: _messages_usage(events[-2]["usage"]),
    reason=lambda body: body["stop_reason"],
    cut="max_tokens",
    is_last=lambda event: event["type"] == "message_stop",
    is_anthropic=True,
)

# ---- llama.cpp's completion ------------------------------------------------------------------


def _llamacpp_usage(body: Body) -> Usage:
    return Usage(body["tokens_evaluated"], body["timings"]["cache_n"], body["tokens_predicted"])


COMPLETION_ROUTE = Route(
    "completion",
    "/completion",
    {"prompt": "Hi"},
    "n_predict",
    text=lambda body: body["content"],
    streamed_text=lambda events: "".join(event["content"] for event in events),
    usage=_llamacpp_usage,
    streamed_usage=lambda events: _llamacpp_usage(events[-1]),
    reason=lambda body: body["stop_type"],
    cut="limit",
    is_last=lambda event: event["stop"],
)

# ---- Ollama's chats --------------------------------------------------------------------------


def _ollama_usage(body: Body) -> Usage:
    return Usage(body["prompt_eval_count"], 2, body["eval_count"])  # it has no cached tokens


OLLAMA_ROUTE = Route(
    "ollama",
    "/api/chat",
    {"messages": MESSAGES, "stream": False},
    "num_predict",
    text=lambda body: body["message"]["content"],
    streamed_text=lambda events: "".join(
        event["message"]["content"] for event in events if "message" in event
    ),
    usage=_ollama_usage,
    streamed_usage=lambda events: _ollama_usage(events[-1]),
    reason=lambda body: body["done_reason"],
    cut="length",
    is_last=lambda event: event["done"],
    is_ollama=True,
)

ALL = [
    _chat("chat", "/v1/chat/completions"),
    _completions("completions", "/v1/completions"),
    _responses("responses", "/v1/responses"),
    MESSAGES_ROUTE,
    COMPLETION_ROUTE,
    OLLAMA_ROUTE,
    _chat("llamacpp-chat", "/chat/completions"),
    _responses("llamacpp-responses", "/responses"),
    _chat("invocations-chat", "/invocations"),
    _completions("invocations-completions", "/invocations"),
]
ROUTES = [route for route in ALL if route.path in served_paths(route.path)]
