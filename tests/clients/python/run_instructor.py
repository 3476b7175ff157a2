"""The cells of instructor, with its mode for tools, which is its default, and for JSON schemas."""

from __future__ import annotations

import threading
from typing import Any

import instructor
import openai
from cells import (
    MESSAGES,
    TOO_HOT,
    WEATHER_MESSAGES,
    check_error,
    check_usage,
    raised,
    run,
    target,
)
from pydantic import BaseModel, Field

TARGET = target()
CHAT: dict[str, Any] = {
    "model": "demo",
    "temperature": 0,
    "max_tokens": 100,
    "messages": MESSAGES,
    "max_retries": 0,
}


# Without extra="forbid" the schema allows the model to add other properties.
class City(BaseModel, extra="forbid"):
    city: str = Field(max_length=20)


class Story(BaseModel, extra="forbid"):
    words: list[str] = Field(min_length=300)


def client(
    key: str = TARGET.key,
    url: str = TARGET.base_url,
    mode: instructor.Mode = instructor.Mode.TOOLS,
) -> Any:
    return instructor.from_openai(
        openai.OpenAI(base_url=url, api_key=key, max_retries=0), mode=mode
    )


def chat() -> None:
    answer = client().create(**CHAT, response_model=None)
    assert "Paris" in answer.choices[0].message.content


def stream() -> None:
    json_mode = client(mode=instructor.Mode.JSON_SCHEMA)
    parts = list(json_mode.create_partial(**CHAT, response_model=City))
    assert len(parts) > 1
    assert isinstance(parts[-1].city, str)


def usage() -> None:
    _, answer = client().create_with_completion(**CHAT, response_model=City)
    check_usage(answer.usage.prompt_tokens, answer.usage.completion_tokens)


def tools() -> None:
    city = client().create(**CHAT | {"messages": WEATHER_MESSAGES}, response_model=City)
    assert isinstance(city, City)


def tools_streamed() -> None:
    parts = list(client().create_partial(**CHAT, response_model=City))
    assert len(parts) > 1
    assert isinstance(parts[-1].city, str)


def json_schema() -> None:
    city = client(mode=instructor.Mode.JSON_SCHEMA).create(**CHAT, response_model=City)
    assert isinstance(city, City)


def bad_request() -> None:
    fields = CHAT | {"temperature": TOO_HOT}
    check_error(raised(lambda: client().create(**fields, response_model=City)), 400, "temperature")


def wrong_key() -> None:
    check_error(raised(lambda: client("wrong").create(**CHAT, response_model=City)), 401)


def rate_limit() -> None:
    limited = client(TARGET.limited_key)
    limited.create(**CHAT, response_model=City)
    check_error(raised(lambda: limited.create(**CHAT, response_model=City)), 429)


def stream_error() -> None:
    timer = threading.Timer(1, TARGET.kill_engine)
    endless = client(url=TARGET.endless_base_url, mode=instructor.Mode.JSON_SCHEMA)
    fields = CHAT | {"max_tokens": 1000}
    timer.start()
    error = raised(lambda: endless.create_partial(**fields, response_model=Story))
    assert "engine" in str(error), error


run(
    globals(),
    several="a response is one object",
    abort="the client reads a whole stream before it returns the first part",
)
