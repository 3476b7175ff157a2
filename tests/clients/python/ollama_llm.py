"""The cells of llm-ollama, the plugin of Simon Willison's `llm`."""

from __future__ import annotations

import base64
import json
import os
import tempfile
from typing import Any

from cells import CITY_SCHEMA, QUESTION, WEATHER, check_pieces, raised
from ollama_cells import ENCODER, MODEL, SEER, TARGET, TOO_HOT, check_vector, run

os.environ["LLM_USER_PATH"] = tempfile.mkdtemp(prefix="llm-")
os.environ["OLLAMA_HOST"] = TARGET.url

import llm  # it reads the variables


def model(name: str = MODEL, url: str = TARGET.url) -> Any:
    os.environ["OLLAMA_HOST"] = url
    return llm.get_model(f"ollama/{name}")


def models() -> None:
    assert model().supports_tools


def chat() -> None:
    answer = model().prompt(QUESTION, temperature=0, num_predict=100, stream=False)
    assert "Paris" in answer.text()


def stream() -> None:
    check_pieces(list(model().prompt(QUESTION, temperature=0, num_predict=100)))


def tools() -> None:
    def get_weather(city: str) -> str:
        """Return the weather of a city."""
        return "21 degrees"

    chain = model().chain(WEATHER, tools=[get_weather], options={"temperature": 0})
    assert "21" in chain.text()


def format() -> None:
    schema = {**CITY_SCHEMA, "properties": {"city": {"type": "string", "maxLength": 20}}}
    answer = model().prompt(QUESTION, schema=schema, temperature=0)
    assert list(json.loads(answer.text())) == ["city"]


def image() -> None:
    picture = llm.Attachment(type="image/png", content=base64.b64decode(TARGET.picture))
    answer = model(SEER, TARGET.seeing_url).prompt(
        TARGET.question, attachments=[picture], temperature=0, num_predict=TARGET.seen_tokens
    )
    assert answer.text() == TARGET.seen


def embed() -> None:
    os.environ["OLLAMA_HOST"] = TARGET.encoder_url
    check_vector(llm.get_embedding_model(f"ollama/{ENCODER}").embed(TARGET.text))


def refused() -> None:
    error = raised(lambda: model().prompt(QUESTION, temperature=TOO_HOT).text())
    assert "temperature" in str(error)


run(
    "llm-ollama",
    models=models,
    chat=chat,
    stream=stream,
    tools=tools,
    format=format,
    image=image,
    embed=embed,
    refused=refused,
)
