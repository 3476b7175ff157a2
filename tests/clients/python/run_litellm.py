"""The cells of LiteLLM."""

from __future__ import annotations

import json
from typing import Any

import litellm
from cells import (
    MESSAGES,
    TOO_HOT,
    TOOL,
    WEATHER_MESSAGES,
    check_call,
    check_error,
    check_pieces,
    check_usage,
    raised,
    run,
    target,
)
from pydantic import BaseModel

TARGET = target()
CHAT: dict[str, Any] = {
    "model": "openai/demo",
    "temperature": 0,
    "max_tokens": 100,
    "messages": MESSAGES,
    "api_base": TARGET.base_url,
    "api_key": TARGET.key,
    "max_retries": 0,
}
STREAM: dict[str, Any] = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
TOOLS: dict[str, Any] = {
    "messages": WEATHER_MESSAGES,
    "tools": [TOOL],
    "tool_choice": "required",
}
ENDLESS: dict[str, Any] = STREAM | {"api_base": TARGET.endless_base_url, "max_tokens": 1000}


class City(BaseModel):
    city: str
    country: str


def chat() -> None:
    assert "Paris" in litellm.completion(**CHAT).choices[0].message.content


def stream() -> None:
    chunks = litellm.completion(**STREAM)
    check_pieces([text for chunk in chunks if (text := chunk.choices[0].delta.content)])


def usage() -> None:
    whole = litellm.completion(**CHAT).usage
    check_usage(whole.prompt_tokens, whole.completion_tokens)
    chunks = list(litellm.completion(**STREAM))
    assert chunks[-1].usage.total_tokens == whole.total_tokens


def several() -> None:
    assert len(litellm.completion(**CHAT | {"temperature": 1, "n": 2}).choices) == 2


def tools() -> None:
    answer = litellm.completion(**CHAT | TOOLS)
    [call] = answer.choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'}
    history = [*WEATHER_MESSAGES, answer.choices[0].message, result]
    message = litellm.completion(**CHAT | {"messages": history, "tools": [TOOL]}).choices[0].message
    assert message.content or message.tool_calls


def tools_streamed() -> None:
    chunks = list(litellm.completion(**STREAM | TOOLS))
    answer = litellm.stream_chunk_builder(chunks, messages=WEATHER_MESSAGES)
    [call] = answer.choices[0].message.tool_calls
    check_call(call.function.name, call.function.arguments)


def json_schema() -> None:
    answer = litellm.completion(**CHAT, response_format=City)
    assert City(**json.loads(answer.choices[0].message.content))


def bad_request() -> None:
    error = raised(lambda: litellm.completion(**CHAT | {"temperature": TOO_HOT}))
    check_error(error, 400, "temperature")


def wrong_key() -> None:
    check_error(raised(lambda: litellm.completion(**CHAT | {"api_key": "wrong"})), 401)


def rate_limit() -> None:
    limited = CHAT | {"api_key": TARGET.limited_key}
    litellm.completion(**limited)
    check_error(raised(lambda: litellm.completion(**limited)), 429)


def abort() -> None:
    chunks = litellm.completion(**ENDLESS)
    next(chunks)
    chunks.completion_stream.close()  # the client's own wrapper has no method to close it
    TARGET.check_aborted()


def stream_error() -> None:
    chunks = litellm.completion(**ENDLESS)
    next(chunks)
    TARGET.kill_engine()
    error = raised(lambda: list(chunks))
    assert "engine" in str(error), error


run(globals())
