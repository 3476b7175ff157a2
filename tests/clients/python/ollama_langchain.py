"""The cells of langchain-ollama."""

from __future__ import annotations

from typing import Any

from cells import QUESTION, WEATHER, check_call, check_pieces, check_usage, raised
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_ollama import ChatOllama, OllamaEmbeddings, OllamaLLM
from ollama_cells import ENCODER, GREEDY, MODEL, SEER, TARGET, TOO_HOT, check_vector, run
from pydantic import BaseModel, Field


class City(BaseModel):
    city: str = Field(max_length=20)


def get_weather(city: str) -> str:
    """Return the weather of a city."""
    return f"21 degrees in {city}"


def client(**fields: Any) -> ChatOllama:
    return ChatOllama(model=MODEL, base_url=TARGET.url, **{**GREEDY, **fields})


def models() -> None:
    client(validate_model_on_init=True)


def chat() -> None:
    answer = client().invoke(QUESTION)
    assert "Paris" in str(answer.content)
    usage = answer.usage_metadata
    assert usage is not None
    check_usage(usage["input_tokens"], usage["output_tokens"])
    assert answer.response_metadata["done_reason"] == "stop"
    assert "Paris" in OllamaLLM(model=MODEL, base_url=TARGET.url, **GREEDY).invoke(QUESTION)


def stream() -> None:
    check_pieces([str(part.content) for part in client().stream(QUESTION)])


def tools() -> None:
    with_tools = client().bind_tools([get_weather])
    answer = with_tools.invoke(WEATHER)
    [call] = answer.tool_calls
    check_call(call["name"], call["args"])
    result = ToolMessage("21 degrees", tool_call_id=call["id"])
    assert "21" in str(with_tools.invoke([HumanMessage(WEATHER), answer, result]).content)


def format() -> None:
    found = client().with_structured_output(City).invoke(QUESTION)
    assert isinstance(found, City)


def image() -> None:
    url = f"data:image/png;base64,{TARGET.picture}"
    parts: list[Any] = [
        {"type": "text", "text": TARGET.question},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    seer = ChatOllama(
        model=SEER, base_url=TARGET.seeing_url, temperature=0, num_predict=TARGET.seen_tokens
    )
    # It puts a line break before each text.
    assert seer.invoke([HumanMessage(parts)]).content == TARGET.seen_below_break


def embed() -> None:
    embeddings = OllamaEmbeddings(model=ENCODER, base_url=TARGET.encoder_url)
    check_vector(embeddings.embed_query(TARGET.text))


def refused() -> None:
    error = raised(lambda: client(temperature=TOO_HOT).invoke(QUESTION))
    assert "options.temperature" in str(error)


run(
    "langchain-ollama",
    models=models,
    chat=chat,
    stream=stream,
    tools=tools,
    format=format,
    image=image,
    embed=embed,
    refused=refused,
)
