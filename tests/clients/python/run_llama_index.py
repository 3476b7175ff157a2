"""The cells of llama-index's OpenAILike."""

from __future__ import annotations

import gc
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
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

TARGET = target()
CHAT = [ChatMessage(role="user", content=QUESTION)]


class City(BaseModel):
    city: str
    country: str


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"21 degrees in {city}"


TOOL = FunctionTool.from_defaults(get_weather)
TOOLS: dict[str, Any] = {"user_msg": WEATHER, "tool_required": True}


def client(key: str = TARGET.key, url: str = TARGET.base_url, **fields: Any) -> OpenAILike:
    settings: dict[str, Any] = {"temperature": 0, "max_tokens": 100, "context_window": 1024}
    models = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0}
    return OpenAILike(model="demo", api_base=url, api_key=key, **models, **settings | fields)


def chat() -> None:
    assert "Paris" in client().complete(QUESTION).text


def stream() -> None:
    check_pieces([part.delta for part in client().stream_complete(QUESTION) if part.delta])


def usage() -> None:
    whole = client().chat(CHAT).raw.usage
    check_usage(whole.prompt_tokens, whole.completion_tokens)
    more: Any = {"stream_options": {"include_usage": True}}
    *_, last = client(additional_kwargs=more).stream_chat(CHAT)
    assert last.raw.usage.total_tokens == whole.total_tokens


def several() -> None:
    raw = client(temperature=1, additional_kwargs={"n": 2}).chat(CHAT).raw
    assert len(raw.choices) == 2


def tools() -> None:
    llm = client()
    answer = llm.chat_with_tools([TOOL], **TOOLS)
    [call] = llm.get_tool_calls_from_response(answer)
    check_call(call.tool_name, call.tool_kwargs)
    result = ChatMessage(
        role="tool", content="21 degrees", additional_kwargs={"tool_call_id": call.tool_id}
    )
    history = [ChatMessage(role="user", content=WEATHER), answer.message, result]
    assert llm.chat_with_tools([TOOL], chat_history=history).message.content


def tools_streamed() -> None:
    llm = client()
    *_, last = llm.stream_chat_with_tools([TOOL], **TOOLS)
    [call] = llm.get_tool_calls_from_response(last)
    check_call(call.tool_name, call.tool_kwargs)


def json_schema() -> None:
    llm = client(should_use_structured_outputs=True)
    assert isinstance(llm.as_structured_llm(City).complete(QUESTION).raw, City)


def bad_request() -> None:
    hot = client(additional_kwargs={"temperature": TOO_HOT})  # the field itself ends at 2
    check_error(raised(lambda: hot.chat(CHAT)), 400, "temperature")


def wrong_key() -> None:
    check_error(raised(lambda: client("wrong").chat(CHAT)), 401)


def rate_limit() -> None:
    limited = client(TARGET.limited_key)
    limited.chat(CHAT)
    check_error(raised(lambda: limited.chat(CHAT)), 429)


def abort() -> None:
    parts = client(url=TARGET.endless_base_url, max_tokens=8000).stream_chat(CHAT)
    next(parts)
    parts.close()
    del parts
    gc.collect()  # the client leaves it to this to close the connection
    TARGET.check_aborted()


def stream_error() -> None:
    parts = client(url=TARGET.endless_base_url, max_tokens=1000).stream_chat(CHAT)
    next(parts)
    TARGET.kill_engine()
    error = raised(lambda: list(parts))
    assert "engine" in str(error), error


run(globals())
