"""The cells of llama-index-llms-ollama."""

from __future__ import annotations

import base64
from typing import Any

from cells import QUESTION, WEATHER, check_call, check_pieces, check_usage, raised
from llama_index.core.base.llms.types import ImageBlock, TextBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.ollama import Ollama
from ollama_cells import MODEL, SEER, TARGET, TOO_HOT, run
from pydantic import BaseModel, Field


class City(BaseModel):
    city: str = Field(max_length=20)


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"21 degrees in {city}"


def client(url: str = TARGET.url, model: str = MODEL, **fields: Any) -> Ollama:
    settings = {"temperature": 0.0, "additional_kwargs": {"num_predict": 100}} | fields
    return Ollama(model=model, base_url=url, **settings)


def models() -> None:
    assert client().metadata.context_window == 16384


def chat() -> None:
    assert "Paris" in client().complete(QUESTION).text
    usage = client().chat([ChatMessage(role="user", content=QUESTION)]).raw["usage"]
    check_usage(usage["prompt_tokens"], usage["completion_tokens"])


def stream() -> None:
    check_pieces([part.delta or "" for part in client().stream_complete(QUESTION)])


def tools() -> None:
    tool = FunctionTool.from_defaults(get_weather)
    answer = client().chat_with_tools([tool], user_msg=WEATHER)
    [call] = client().get_tool_calls_from_response(answer)
    check_call(call.tool_name, call.tool_kwargs)


def format() -> None:
    found = client().as_structured_llm(City).complete(QUESTION).raw
    assert isinstance(found, City)


def image() -> None:
    blocks = [
        TextBlock(text=TARGET.question),
        ImageBlock(image=base64.b64decode(TARGET.picture)),
    ]
    seer = client(TARGET.seeing_url, SEER, additional_kwargs={"num_predict": TARGET.seen_tokens})
    answer = seer.chat([ChatMessage(role="user", blocks=blocks)])
    assert answer.message.content == TARGET.seen


def refused() -> None:
    error = raised(lambda: client(temperature=TOO_HOT).complete(QUESTION))
    assert "options.temperature" in str(error)


run(
    "llama-index-llms-ollama",
    models=models,
    chat=chat,
    stream=stream,
    tools=tools,
    format=format,
    image=image,
    refused=refused,
)
