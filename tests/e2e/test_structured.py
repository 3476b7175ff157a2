"""Structured output of a real server with the official client: schemas, streams, n, refusals."""

from __future__ import annotations

import concurrent.futures
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.support.serve import Server

DEMO = Path(__file__).parents[2] / "engine" / "demo" / "model"
ANY_OBJECT: Any = {"type": "json_object"}
HELLO: Any = [{"role": "user", "content": "Hello"}]
CHAT: dict[str, Any] = {"model": "demo", "messages": HELLO, "max_tokens": 300, "temperature": 1}


class Person(pydantic.BaseModel, extra="forbid"):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=150)
    tags: list[Literal["old", "young"]] = pydantic.Field(max_length=2)


@pytest.fixture
def sdk(demo: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{demo.base_url}/v1", api_key="-", max_retries=0) as sdk:
        yield sdk


def test_client_parses_answers_into_its_class(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.parse(**CHAT, response_format=Person, n=3, seed=1, logprobs=True)
    assert len(answer.choices) == 3
    people = [choice.message.parsed for choice in answer.choices]
    assert all(isinstance(person, Person) for person in people)
    assert len(set(map(str, people))) > 1
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert "".join(token.token for token in logprobs.content or ()) == (
        answer.choices[0].message.content
    )


def test_stream_and_whole_answer_are_equal_and_end_in_time(sdk: openai.OpenAI) -> None:
    schema = {"name": "person", "schema": Person.model_json_schema()}
    wanted: Any = {"type": "json_schema", "json_schema": schema}
    whole = sdk.chat.completions.create(**CHAT, response_format=wanted, seed=5)
    stream = sdk.chat.completions.create(**CHAT, response_format=wanted, seed=5, stream=True)
    pieces = [chunk.choices[0] for chunk in stream]
    assert "".join(piece.delta.content or "" for piece in pieces) == (
        whole.choices[0].message.content
    )
    assert pieces[-1].finish_reason == whole.choices[0].finish_reason == "stop"
    cut = sdk.chat.completions.create(
        **CHAT | {"max_tokens": 4}, response_format=wanted, seed=5, stream=True
    )
    assert [piece.choices[0].finish_reason for piece in cut][-1] == "length"


def test_stop_string_and_penalties_go_with_a_schema(sdk: openai.OpenAI) -> None:
    extra = {"guided_json": {"type": "integer", "minimum": 1000, "maximum": 9999}}
    for more in ({"frequency_penalty": 2}, {"presence_penalty": 2}, {"logit_bias": {"300": 100}}):
        answer = sdk.chat.completions.create(**CHAT, **more, extra_body=extra)
        assert 1000 <= int(answer.choices[0].message.content or "") <= 9999
    answer = sdk.chat.completions.create(**CHAT, stop=['"age'], response_format=ANY_OBJECT)
    text = answer.choices[0].message.content or ""
    assert '"age' not in text


@pytest.mark.parametrize("stream", [False, True])
def test_keyword_that_cannot_be_followed_is_a_400_before_any_byte(
    sdk: openai.OpenAI, demo: Server, stream: bool
) -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refusal:
        sdk.chat.completions.create(**CHAT, response_format=wanted, stream=stream)
    assert refusal.value.code == "invalid_grammar"
    assert refusal.value.param == "response_format.json_schema.schema"
    assert 'Unimplemented keys: ["not"]' in refusal.value.message
    demo.wait_idle()


def test_many_requests_with_different_schemas_at_once(demo: Server) -> None:
    """Constrained and free requests share steps; every constrained one fits its own schema."""

    def ask(number: int) -> bool:
        least = 10**number
        integer = {"type": "integer", "minimum": least, "maximum": 10 * least}  # of finite length
        schema: dict[str, Any] = {"type": "object", "properties": {"n": integer}}
        schema |= {"required": ["n"], "additionalProperties": False}
        body = {"prompt": "Hello", "max_tokens": 60, "temperature": 1, "seed": number}
        if number % 3:
            body["structured_outputs"] = {"json": schema}
        with openai.OpenAI(base_url=f"{demo.base_url}/v1", api_key="-") as sdk:
            answer = sdk.post("/completions", body=body, cast_to=dict[str, Any])
        [choice] = answer["choices"]
        followed = bool(number % 3) and choice["finish_reason"] == "stop"
        if followed:
            jsonschema.validate(json.loads(choice["text"]), schema)
        return followed

    with concurrent.futures.ThreadPoolExecutor(12) as threads:
        assert sum(threads.map(ask, range(12))) >= 6
    demo.wait_idle()


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {"data": {"type": "object"}}, "required": ["data"]},
    ],
    ids=["arguments", "inside"],
)
def test_forced_call_with_an_open_object_ends_though_the_model_would_go_on(
    sdk: openai.OpenAI, schema: dict[str, Any]
) -> None:
    """The bias is against all brackets, so that only the grammar forces the one that closes.

    It is in favour of the ends of texts, because texts have no limit.
    """
    vocabulary = json.loads((DEMO / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    bias = {str(vocabulary[text]): 8 for text in ('"', '",')}
    bias |= {str(n): -100 for text, n in vocabulary.items() if not set("{}[").isdisjoint(text)}
    save: Any = {"name": "save", "description": "Save data", "parameters": schema}
    ended = 0
    for seed in range(4):
        answer = sdk.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Save this: Ada is 36 and lives in Oslo."}],
            tools=[{"type": "function", "function": save}],
            tool_choice="required",
            parallel_tool_calls=False,
            max_tokens=700,
            temperature=0.7,
            seed=seed,
            logit_bias=bias,
        )
        [choice] = answer.choices
        if choice.finish_reason == "tool_calls":
            ended += 1
            call: Any = (choice.message.tool_calls or [])[0]
            jsonschema.validate(json.loads(call.function.arguments), schema)
    assert ended >= 3, "a text may still be cut"
