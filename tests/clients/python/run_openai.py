"""The cells of openai for Python."""

from __future__ import annotations

import json
from typing import Any

import openai
from cells import (
    MESSAGES,
    TOO_HOT,
    TOOL,
    WEATHER_MESSAGES,
    check_call,
    check_pieces,
    check_usage,
    raised,
    run,
    target,
)
from pydantic import BaseModel

TARGET = target()
CHAT: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 100, "messages": MESSAGES}
TOOLS: dict[str, Any] = CHAT | {
    "messages": WEATHER_MESSAGES,
    "tools": [TOOL],
    "tool_choice": "required",
}


class City(BaseModel):
    city: str
    country: str


def client(key: str = TARGET.key, url: str = TARGET.base_url) -> openai.OpenAI:
    return openai.OpenAI(base_url=url, api_key=key, max_retries=0)


def chat() -> None:
    answer = client().chat.completions.create(**CHAT)
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"


def stream() -> None:
    chunks = client().chat.completions.create(**CHAT, stream=True)
    check_pieces([text for chunk in chunks if (text := chunk.choices[0].delta.content)])


def usage() -> None:
    whole = client().chat.completions.create(**CHAT).usage
    assert whole is not None
    check_usage(whole.prompt_tokens, whole.completion_tokens)
    options: Any = {"include_usage": True}
    chunks = client().chat.completions.create(**CHAT, stream=True, stream_options=options)
    assert [chunk.usage for chunk in chunks if chunk.usage] == [whole]


def several() -> None:
    fields = CHAT | {"temperature": 1, "n": 2}
    answer = client().chat.completions.create(**fields)
    assert [choice.index for choice in answer.choices] == [0, 1]


def tools() -> None:
    answer = client().chat.completions.create(**TOOLS)
    [call] = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    check_call(call.function.name, call.function.arguments)
    assert answer.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"degrees": 21}'}
    history = [*WEATHER_MESSAGES, answer.choices[0].message, result]
    final = client().chat.completions.create(**CHAT | {"messages": history, "tools": [TOOL]})
    message = final.choices[0].message
    assert message.content or message.tool_calls


def tools_streamed() -> None:
    with client().chat.completions.stream(**TOOLS) as events:
        pieces = [event.arguments_delta for event in events if "arguments.delta" in event.type]
        final = events.get_final_completion()
    [call] = final.choices[0].message.tool_calls or []
    check_call(call.function.name, call.function.arguments)
    assert "".join(pieces) == call.function.arguments


def json_schema() -> None:
    answer = client().chat.completions.parse(**CHAT, response_format=City)
    assert isinstance(answer.choices[0].message.parsed, City)


def bad_request() -> None:
    error = raised(lambda: client().chat.completions.create(**CHAT | {"temperature": TOO_HOT}))
    assert isinstance(error, openai.BadRequestError)
    assert error.param == "temperature"


def wrong_key() -> None:
    error = raised(lambda: client("wrong").chat.completions.create(**CHAT))
    assert isinstance(error, openai.AuthenticationError)


def rate_limit() -> None:
    limited = client(TARGET.limited_key)
    limited.chat.completions.create(**CHAT)
    error = raised(lambda: limited.chat.completions.create(**CHAT))
    assert isinstance(error, openai.RateLimitError)
    assert int(error.response.headers["retry-after"]) > 0


def abort() -> None:
    fields = CHAT | {"max_tokens": 1000}
    chunks = client(url=TARGET.endless_base_url).chat.completions.create(**fields, stream=True)
    next(chunks)
    chunks.close()
    TARGET.check_aborted()


def stream_error() -> None:
    fields = CHAT | {"max_tokens": 1000}
    chunks = client(url=TARGET.endless_base_url).chat.completions.create(**fields, stream=True)
    next(chunks)
    TARGET.kill_engine()
    error = raised(lambda: list(chunks))
    assert isinstance(error, openai.APIError), error
    assert error.code == "engine_unavailable", json.dumps(error.body)


run(globals())
