"""The cells of ollama's client, and of its asynchronous one as Home Assistant calls it.

The calls of Home Assistant are those of homeassistant/components/ollama: `entity.py` (chats),
`config_flow.py` (the list of models), `ai_task.py` (a format).
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import ollama
from cells import (
    CITY_SCHEMA,
    MESSAGES,
    QUESTION,
    WEATHER,
    check_call,
    check_pieces,
    check_usage,
    raised,
)
from ollama_cells import (
    ENCODER,
    GREEDY,
    MODEL,
    SEER,
    TARGET,
    TOO_HOT,
    check_vector,
    run,
)

CLIENT = ollama.Client(host=TARGET.url)


def get_weather(city: str) -> str:
    """Return the weather of a city.

    Args:
      city: The name of the city.
    """
    return f"21 degrees in {city}"


def models() -> None:
    [listed] = CLIENT.list().models
    assert (listed.model, len(listed.digest or "")) == (MODEL, 64)
    assert listed.modified_at is not None
    [running] = CLIENT.ps().models
    assert running.context_length == 16384
    shown = CLIENT.show(MODEL)
    assert (shown.modelinfo or {})["llama.context_length"] == 16384
    assert "tools" in (shown.capabilities or ())
    [*_, last] = CLIENT.pull(MODEL, stream=True)
    assert last.status == "success"


def chat() -> None:
    answer = CLIENT.chat(MODEL, MESSAGES, options=GREEDY)
    assert "Paris" in (answer.message.content or "")
    check_usage(answer.prompt_eval_count, answer.eval_count)
    assert answer.done_reason == "stop"
    assert "Paris" in (CLIENT.generate(MODEL, QUESTION, options=GREEDY).response or "")
    raw = CLIENT.generate(MODEL, QUESTION, raw=True, options={"num_predict": 1})
    assert raw.eval_count == 1


def stream() -> None:
    parts = list(CLIENT.chat(MODEL, MESSAGES, stream=True, options=GREEDY))
    check_pieces([part.message.content or "" for part in parts])
    assert parts[-1].done
    check_usage(parts[-1].prompt_eval_count, parts[-1].eval_count)
    parts = list(CLIENT.generate(MODEL, QUESTION, stream=True, options=GREEDY))
    check_pieces([part.response or "" for part in parts])


def tools() -> None:
    messages: list[Any] = [{"role": "user", "content": WEATHER}]
    answer = CLIENT.chat(MODEL, messages, tools=[get_weather], options=GREEDY)
    [call] = answer.message.tool_calls or ()
    check_call(call.function.name, dict(call.function.arguments))
    result = get_weather(**call.function.arguments)
    messages += [answer.message, {"role": "tool", "content": result, "tool_name": "get_weather"}]
    answer = CLIENT.chat(MODEL, messages, tools=[get_weather], options=GREEDY)
    assert "21" in (answer.message.content or ""), answer.message


def format() -> None:
    answer = CLIENT.chat(MODEL, MESSAGES, format=CITY_SCHEMA, options=GREEDY)
    assert list(json.loads(answer.message.content or "")) == ["city"]
    answer = CLIENT.generate(MODEL, QUESTION, format="json", options=GREEDY | {"num_predict": 400})
    assert answer.done_reason == "length" or json.loads(answer.response or "") is not None


def image() -> None:
    message = {"role": "user", "content": TARGET.question, "images": [TARGET.picture]}
    options = {"temperature": 0, "num_predict": TARGET.seen_tokens}
    answer = ollama.Client(host=TARGET.seeing_url).chat(SEER, [message], options=options)
    assert answer.message.content == TARGET.seen
    answer = ollama.Client(host=TARGET.seeing_url).generate(
        SEER, TARGET.question, images=[TARGET.picture], options=options
    )
    assert answer.response == TARGET.seen


def embed() -> None:
    client = ollama.Client(host=TARGET.encoder_url)
    [vector] = client.embed(ENCODER, TARGET.text).embeddings
    check_vector(vector)
    check_vector(client.embeddings(ENCODER, TARGET.text).embedding)


def refused() -> None:
    error = raised(lambda: CLIENT.chat(MODEL, MESSAGES, options={"temperature": TOO_HOT}))
    assert isinstance(error, ollama.ResponseError)
    assert error.status_code == 400
    assert "options.temperature" in error.error
    error = raised(lambda: list(CLIENT.chat("other", MESSAGES, stream=True)))
    assert isinstance(error, ollama.ResponseError)
    assert error.status_code == 404


def decisions() -> None:
    """Of System One."""
    answer = CLIENT.systemone(
        MODEL,
        {"text": "Paris is the capital of France."},
        {
            "city": {"type": "choice", "instructions": "Which?", "criteria": {"Paris": None}},
            "true": {"type": "noul", "instructions": "Is it in France?"},
            "size": {"type": "score", "instructions": "How large?", "criteria": ["small", "big"]},
        },
    )
    city, true, size = (answer.answers[name] for name in ("city", "true", "size"))
    assert (city.choice, city.confidence) == ("Paris", 1.0)
    assert 0 <= true.noul <= 1
    assert abs(sum(size.probabilities.values()) - 1) < 1e-6
    assert answer.usage.output_tokens == 3


class HomeAssistant:
    """The calls of Home Assistant's integration."""

    def __init__(self) -> None:
        self._client = ollama.AsyncClient(host=TARGET.url, verify=False)

    async def asked(self, messages: list[ollama.Message], **fields: Any) -> ollama.Message:
        """Return the message that the parts of a stream make, as the integration joins them."""
        found = ollama.Message(role="assistant", content="")
        stream = await self._client.chat(
            model=MODEL,
            messages=messages,
            stream=True,
            keep_alive="-1s",
            options={"num_ctx": 8192},
            think=False,
            **fields,
        )
        calls: list[Any] = []
        async for part in stream:
            calls += part["message"].get("tool_calls") or []
            found.content = (found.content or "") + (part["message"].get("content") or "")
        found.tool_calls = calls or None
        return found

    async def models(self) -> None:
        listed = await self._client.list()
        assert MODEL in {each["model"] for each in listed["models"]}

    async def tools(self) -> None:
        system = ollama.Message(role="system", content="Answer in a few words.")
        messages = [system, ollama.Message(role="user", content=WEATHER)]
        function = {"name": "get_weather", "description": "", "parameters": CITY_SCHEMA}
        tools = [{"type": "function", "function": function}]
        answer = await self.asked(messages, tools=tools)
        calls = answer.tool_calls or ()
        for call in calls:
            check_call(call.function.name, dict(call.function.arguments))
        assert calls or answer.content
        result = ollama.Message(role="tool", content='{"degrees": 21}')
        assert (await self.asked([*messages, answer, result], tools=tools)).content is not None

    async def stream(self) -> None:
        answer = await self.asked([ollama.Message(role="user", content=QUESTION)], tools=None)
        assert answer.content

    async def format(self) -> None:
        message = ollama.Message(role="user", content=QUESTION)
        schema = {**CITY_SCHEMA, "properties": {"city": {"type": "string", "maxLength": 20}}}
        answer = await self.asked([message], tools=None, format=schema)
        assert list(json.loads(answer.content or "")) == ["city"]


def of_home_assistant(name: str) -> Any:
    async def call() -> None:
        await getattr(HomeAssistant(), name)()

    return lambda: asyncio.run(call())


run(
    "ollama (Python)",
    models=models,
    chat=chat,
    stream=stream,
    tools=tools,
    format=format,
    image=image,
    embed=embed,
    refused=refused,
    decisions=decisions,
)
HOME_ASSISTANT_CELLS = ("models", "stream", "tools", "format")
run("Home Assistant's calls", **{name: of_home_assistant(name) for name in HOME_ASSISTANT_CELLS})
