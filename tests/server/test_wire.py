"""Validate responses against OpenAI's published OpenAPI schemas."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from tests.server.generation.test_sse import events
from tests.support.fake_encoder import FakeEncoder
from tests.support.rig import serving


def component(text: str, name: str) -> dict[str, Any]:
    """Parse one schema of openapi.yaml; parsing the whole file takes half a minute."""
    start = re.search(rf"^    {name}:\n", text, re.MULTILINE)
    assert start, name
    end = re.compile(r"^ {0,4}\S", re.MULTILINE).search(text, start.end())
    return yaml.safe_load(text[start.start() : end.start() if end else None])[name]


def closure(text: str, name: str) -> dict[str, Any]:
    """Return the schema, with all schemas that it references under $defs."""
    found: dict[str, Any] = {}
    wanted = [name]
    while wanted:
        if (current := wanted.pop()) not in found:
            found[current] = component(text, current)
            wanted += re.findall(r"#/components/schemas/(\w+)", str(found[current]))
    return {"$ref": f"#/$defs/{name}", "$defs": {n: plain(schema) for n, schema in found.items()}}


def plain(schema: Any) -> Any:
    """Convert OpenAPI's `nullable` and references to JSON Schema."""
    if isinstance(schema, list):
        return [plain(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: plain(value) for key, value in schema.items()}
    if "$ref" in schema and isinstance(schema["$ref"], str):
        schema["$ref"] = schema["$ref"].replace("#/components/schemas/", "#/$defs/")
    if schema.pop("nullable", False) is True:
        return {"anyOf": [schema, {"type": "null"}]}
    return schema


@pytest.fixture(scope="module")
def specification(assets: Path) -> str:
    return (assets / "openai-spec" / "openapi.yaml").read_text()


@pytest.fixture(scope="module")
def validator(specification):
    def make(name: str) -> Draft202012Validator:
        return Draft202012Validator(closure(specification, name))

    return make


async def test_chat_response_matches_openai_schema(served, validator):
    check = validator("CreateChatCompletionResponse")
    for fields in ({}, {"n": 2, "logprobs": True, "top_logprobs": 2}, {"max_tokens": 3}):
        check.validate((await served.chat(**fields)).json())


async def test_chat_chunks_match_openai_schema(served, validator):
    check = validator("CreateChatCompletionStreamResponse")
    fields = {
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
        "stream_options": {"include_usage": True},
    }
    for chunk in events((await served.chat(stream=True, **fields)).text)[:-1]:
        check.validate(chunk)


async def test_completion_response_matches_openai_schema(served, validator):
    check = validator("CreateCompletionResponse")
    for fields in ({}, {"n": 2, "logprobs": 2}, {"echo": True}):
        check.validate((await served.complete(**fields)).json())


async def test_models_response_matches_openai_schema(served, validator):
    validator("ListModelsResponse").validate((await served.http.get("/v1/models")).json())


async def test_error_response_matches_openai_schema(served, validator):
    validator("ErrorResponse").validate((await served.chat(n=0)).json())


async def test_validator_rejects_response_without_finish_reason(served, validator):
    body = (await served.chat()).json()
    del body["choices"][0]["finish_reason"]
    assert not validator("CreateChatCompletionResponse").is_valid(body)


async def test_embeddings_request_and_response_match_openai_schema(model, validator):
    async with serving(FakeEncoder(lambda r: []), model) as served:
        body = {"input": ["a", "b"], "model": "tiny", "user": "u", "encoding_format": "float"}
        validator("CreateEmbeddingRequest").validate(body)
        answer = (await served.http.post("/v1/embeddings", json=body)).json()
    validator("CreateEmbeddingResponse").validate(answer)
