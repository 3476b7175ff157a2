"""The cells of langchain-openai."""

from __future__ import annotations

from functools import reduce
from operator import add
from typing import Any

from cells import (
    QUESTION,
    TOO_HOT,
    WEATHER,
    check_call,
    check_error,
    check_pieces,
    check_usage,
    raised,
    run,
    target,
)
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

TARGET = target()


class City(BaseModel):
    city: str
    country: str


@tool
def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"21 degrees in {city}"


def client(key: str = TARGET.key, url: str = TARGET.base_url, **fields: Any) -> ChatOpenAI:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "stream_usage": True, **fields}
    return ChatOpenAI(model="demo", base_url=url, api_key=key, max_retries=0, **settings)


def chat() -> None:
    assert "Paris" in client().invoke(QUESTION).content


def stream() -> None:
    check_pieces([part.content for part in client().stream(QUESTION) if part.content])


def usage() -> None:
    whole = client().invoke(QUESTION).usage_metadata
    check_usage(whole["input_tokens"], whole["output_tokens"])
    last = reduce(add, client().stream(QUESTION)).usage_metadata
    assert last["output_tokens"] == whole["output_tokens"]


def several() -> None:
    result = client(temperature=1, n=2).generate([[HumanMessage(QUESTION)]])
    assert len(result.generations[0]) == 2


def tools() -> None:
    chat = client().bind_tools([get_weather], tool_choice="any")
    answer = chat.invoke(WEATHER)
    [call] = answer.tool_calls
    check_call(call["name"], call["args"])
    history = [("user", WEATHER), answer, get_weather.invoke(call)]
    final = client().bind_tools([get_weather]).invoke(history)
    assert final.content or final.tool_calls


def tools_streamed() -> None:
    parts = list(client().bind_tools([get_weather], tool_choice="any").stream(WEATHER))
    assert len([part for part in parts if part.tool_call_chunks]) > 1
    [call] = reduce(add, parts).tool_calls
    check_call(call["name"], call["args"])


def json_schema() -> None:
    city = client().with_structured_output(City, method="json_schema").invoke(QUESTION)
    assert isinstance(city, City)


def bad_request() -> None:
    check_error(raised(lambda: client(temperature=TOO_HOT).invoke(QUESTION)), 400, "temperature")


def wrong_key() -> None:
    check_error(raised(lambda: client("wrong").invoke(QUESTION)), 401)


def rate_limit() -> None:
    limited = client(TARGET.limited_key)
    limited.invoke(QUESTION)
    check_error(raised(lambda: limited.invoke(QUESTION)), 429)


def abort() -> None:
    parts = client(url=TARGET.endless_base_url, max_tokens=1000).stream(QUESTION)
    next(parts)
    parts.close()
    TARGET.check_aborted()


def stream_error() -> None:
    parts = client(url=TARGET.endless_base_url, max_tokens=1000).stream(QUESTION)
    next(parts)
    TARGET.kill_engine()
    error = raised(lambda: list(parts))
    assert "engine" in str(error), error


run(globals())
