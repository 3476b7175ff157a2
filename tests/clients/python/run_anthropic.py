"""The cells of anthropic for Python, on /v1/messages."""

from __future__ import annotations

import json
from typing import Any

import anthropic
from cells import (
    CITY_SCHEMA,
    MESSAGES,
    TOO_HOT,
    WEATHER_MESSAGES,
    check_call,
    check_pieces,
    check_usage,
    raised,
    run,
    target,
)

TARGET = target()
# The client has no parameter for the temperature any more.
CHAT: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 100,
    "messages": MESSAGES,
    "extra_body": {"temperature": 0},
}
TOOL = {"name": "get_weather", "description": "The weather.", "input_schema": CITY_SCHEMA}
TOOLS: dict[str, Any] = CHAT | {
    "messages": WEATHER_MESSAGES,
    "tools": [TOOL],
    "tool_choice": {"type": "any"},
}
FORMAT: dict[str, Any] = {"format": {"type": "json_schema", "schema": CITY_SCHEMA}}


def client(key: str = TARGET.key, url: str = TARGET.url) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)


def chat() -> None:
    answer = client().messages.create(**CHAT)
    assert "Paris" in answer.content[0].text
    assert answer.stop_reason == "end_turn"


def stream() -> None:
    with client().messages.stream(**CHAT) as events:
        check_pieces(list(events.text_stream))
        assert "Paris" in events.get_final_text()


def usage() -> None:
    whole = client().messages.create(**CHAT).usage
    check_usage(whole.input_tokens, whole.output_tokens)
    with client().messages.stream(**CHAT) as events:
        streamed = events.get_final_message().usage
    assert streamed.output_tokens == whole.output_tokens
    counted = client().messages.count_tokens(model="demo", messages=MESSAGES)
    cached = streamed.cache_read_input_tokens or 0
    assert counted.input_tokens == streamed.input_tokens + cached


def tools() -> None:
    answer = client().messages.create(**TOOLS)
    [call] = [block for block in answer.content if block.type == "tool_use"]
    check_call(call.name, call.input)
    assert answer.stop_reason == "tool_use"
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"degrees": 21}'}
    history = [
        *WEATHER_MESSAGES,
        {"role": "assistant", "content": answer.content},
        {"role": "user", "content": [result]},
    ]
    final = client().messages.create(**CHAT | {"messages": history, "tools": [TOOL]})
    assert final.content


def tools_streamed() -> None:
    with client().messages.stream(**TOOLS) as events:
        pieces = [event.partial_json for event in events if event.type == "input_json"]
        final = events.get_final_message()
    [call] = [block for block in final.content if block.type == "tool_use"]
    check_call(call.name, call.input)
    assert json.loads("".join(pieces)) == call.input


def json_schema() -> None:
    answer = client().messages.create(**CHAT, output_config=FORMAT)
    assert list(json.loads(answer.content[0].text)) == ["city"]


def bad_request() -> None:
    fields = CHAT | {"extra_body": {"temperature": TOO_HOT}}
    error = raised(lambda: client().messages.create(**fields))
    assert isinstance(error, anthropic.BadRequestError), error
    assert "temperature" in error.message


def wrong_key() -> None:
    error = raised(lambda: client("wrong").messages.create(**CHAT))
    assert isinstance(error, anthropic.AuthenticationError), error


def rate_limit() -> None:
    limited = client(TARGET.limited_key)
    limited.messages.create(**CHAT)
    error = raised(lambda: limited.messages.create(**CHAT))
    assert isinstance(error, anthropic.RateLimitError)
    assert int(error.response.headers["retry-after"]) > 0


def abort() -> None:
    with client(url=TARGET.endless_url).messages.stream(**CHAT | {"max_tokens": 1000}) as events:
        next(events.text_stream)
    TARGET.check_aborted()


def stream_error() -> None:
    with client(url=TARGET.endless_url).messages.stream(**CHAT | {"max_tokens": 1000}) as events:
        next(events.text_stream)
        TARGET.kill_engine()
        error = raised(lambda: list(events))
    assert isinstance(error, anthropic.APIStatusError), error
    assert error.body["error"]["type"] in ("api_error", "overloaded_error"), error.body


run(globals(), several="the API has no n")
