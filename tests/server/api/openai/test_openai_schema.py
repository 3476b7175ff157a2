"""Every byte of the OpenAI API against OpenAI's own schemas: of its client and its document."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

from engine.errors import RequestRejectedError
from server.generation.infill import FORMATS
from tests.server.conftest import byte_tokenizer
from tests.support.fake_encoder import FakeEncoder
from tests.support.fake_engine import INFO, NOT_FINITE, FakeEngine
from tests.support.openai_spec import (
    COMPLETION,
    OpenAISpec,
    check_every_fault_is_seen,
    chunks_of,
)
from tests.support.reference_data import located, reference
from tests.support.rig import Served, serving

CHAT, CHAT_CHUNK = "CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"
ERROR = "ErrorResponse"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "weather"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nLet me see.\n{CALL}\n{CALL}"


@pytest.fixture
async def chatty(model: Path, says: Any) -> AsyncIterator[Served]:
    """A server whose answers have thoughts, a text and two calls."""
    info = msgspec.structs.replace(INFO, max_model_len=4096)
    engine = FakeEngine(says(ANSWER), info=info)
    async with serving(engine, model, reasoning_parser="think") as running:
        yield running


# ---- chats -----------------------------------------------------------------------------------


CHATS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 2},
    "logprobs": {"logprobs": True},
    "top_logprobs": {"logprobs": True, "top_logprobs": 3, "n": 2},
    "length": {"max_tokens": 3},
    "stop": {"stop": ["Let"]},
    "tools": {"tools": [WEATHER]},
    "tools_auto": {"tools": [WEATHER], "tool_choice": "auto", "logprobs": True},
    "tools_none": {"tools": [WEATHER], "tool_choice": "none"},
    "tools_required": {"tools": [WEATHER], "tool_choice": "required", "n": 2},
    "tools_named": {"tools": [WEATHER], "tool_choice": NAMED},
    "tools_one_call": {"tools": [WEATHER], "parallel_tool_calls": False},
    "tools_cut": {"tools": [WEATHER], "max_tokens": 80},
    "allowed_tools": {
        "tools": [WEATHER],
        "tool_choice": {
            "type": "allowed_tools",
            "allowed_tools": {"mode": "auto", "tools": [NAMED]},
        },
    },
    "functions": {"functions": [WEATHER["function"]], "n": 2},
    "functions_named": {
        "functions": [WEATHER["function"]],
        "function_call": {"name": "weather"},
    },
    "functions_cut": {"functions": [WEATHER["function"]], "max_tokens": 80},
    "json_object": {"response_format": {"type": "json_object"}},
    "extensions": {"return_token_ids": True, "timings": True},
    "accepted": {"store": True, "metadata": {"a": "b"}, "service_tier": "auto", "user": "u"},
    "prediction": {"prediction": {"type": "content", "content": "Hello"}},
}


def streamed(response: httpx2.Response) -> list[dict[str, Any]]:
    """Return the chunks of a stream that has begun."""
    assert response.status_code == 200, response.text
    return chunks_of(response.text)


@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS)
async def test_chat_answer_has_the_schema(
    chatty: Served, spec: OpenAISpec, fields: dict[str, Any]
) -> None:
    response = await chatty.chat(**fields)
    assert response.status_code == 200, response.text
    spec.check(CHAT, response.json())
    check_every_fault_is_seen(spec, CHAT, response.json())


@pytest.mark.variants(40)
@pytest.mark.parametrize("options", [None, {"include_usage": True}])
@pytest.mark.parametrize("fields", CHATS.values(), ids=CHATS)
async def test_chat_chunks_have_the_schema(
    chatty: Served, spec: OpenAISpec, fields: dict[str, Any], options: dict[str, bool] | None
) -> None:
    response = await chatty.chat(stream=True, stream_options=options, **fields)
    chunks = streamed(response)
    for chunk in chunks:
        spec.check(CHAT_CHUNK, chunk)
        check_every_fault_is_seen(spec, CHAT_CHUNK, chunk)
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    assert len(with_usage) == bool(options)
    assert all(not chunk["choices"] for chunk in with_usage)
    assert all(("usage" in chunk) == bool(options) for chunk in chunks)


async def test_chat_chunks_with_usage_so_far_have_the_schema(
    chatty: Served, spec: OpenAISpec
) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await chatty.chat(stream=True, stream_options=options)
    for chunk in chunks_of(response.text):
        spec.check(CHAT_CHUNK, chunk)
        assert chunk["usage"]["total_tokens"]


async def test_chat_answer_without_finish_reason_has_not_the_schema(
    chatty: Served, spec: OpenAISpec
) -> None:
    body = (await chatty.chat()).json()
    del body["choices"][0]["finish_reason"]
    assert not spec.validator(CHAT).is_valid(body)


@pytest.mark.parametrize("folder", ["openai-streams", reference("openai-spec/openai-python-sse")])
def test_recorded_chunks_of_openai_have_the_schema(spec: OpenAISpec, folder: str) -> None:
    """The schema of the tests above is not stricter than OpenAI's servers."""
    recorded = sorted(located(folder).glob("*.sse"))
    assert recorded
    for file in recorded:
        for event in file.read_text().split("\n\n"):
            if event.startswith("data: {"):
                spec.check(CHAT_CHUNK, json.loads(event.removeprefix("data: ")))


# ---- completions -----------------------------------------------------------------------------


COMPLETIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 2},
    "prompts": {"prompt": ["Hi", "Ho"], "n": 2},
    "echo": {"echo": True},
    "echo_alone": {"echo": True, "max_tokens": 0},
    "logprobs": {"logprobs": 2},
    "no_alternatives": {"logprobs": 0},
    "echo_logprobs": {"echo": True, "logprobs": 2},
    "stop": {"stop": "o"},
    "length": {"max_tokens": 3},
    "extensions": {"return_token_ids": True, "timings": True},
}


@pytest.mark.parametrize("fields", COMPLETIONS.values(), ids=COMPLETIONS)
async def test_completion_has_the_schema(
    served: Served, spec: OpenAISpec, fields: dict[str, Any]
) -> None:
    response = await served.complete(**fields)
    assert response.status_code == 200, response.text
    assert all(choice["finish_reason"] for choice in response.json()["choices"])
    spec.check_completion(response.json())
    check_every_fault_is_seen(spec, COMPLETION, response.json())


async def test_completion_of_several_candidates_has_the_schema(
    served: Served, spec: OpenAISpec
) -> None:
    response = await served.complete(best_of=3, n=2)
    spec.check_completion(response.json())


@pytest.mark.variants(20)
@pytest.mark.parametrize("options", [None, {"include_usage": True}])
@pytest.mark.parametrize("fields", COMPLETIONS.values(), ids=COMPLETIONS)
async def test_completion_chunks_have_the_schema(
    served: Served, spec: OpenAISpec, fields: dict[str, Any], options: dict[str, bool] | None
) -> None:
    response = await served.complete(stream=True, stream_options=options, **fields)
    chunks = streamed(response)
    assert any(chunk.get("usage") for chunk in chunks) == bool(options)
    spec.check_completion_chunks(chunks)


async def test_completion_with_suffix_has_the_schema(
    tmp_path: Path, model: Path, says: Any, spec: OpenAISpec
) -> None:
    folder = shutil.copytree(model, tmp_path / "coder")
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens([*FORMATS[0]])
    tokenizer.save(str(folder / "tokenizer.json"))
    info = msgspec.structs.replace(INFO, vocab_size=261)
    async with serving(FakeEngine(says("x"), info=info), folder) as coder:
        whole = await coder.complete(prompt="def", suffix="return")
        stream = await coder.complete(prompt="def", suffix="return", stream=True)
    spec.check_completion(whole.json())
    spec.check_completion_chunks(chunks_of(stream.text))


# ---- embeddings and models -------------------------------------------------------------------


@pytest.mark.parametrize("fields", [{}, {"dimensions": 2}, {"input": ["a", "b"]}, {"input": [1]}])
async def test_embeddings_have_the_schema(
    model: Path, spec: OpenAISpec, fields: dict[str, Any]
) -> None:
    body = {"input": "a", "model": "tiny", "encoding_format": "float", **fields}
    spec.check("CreateEmbeddingRequest", body)
    async with serving(FakeEncoder(lambda request: []), model, allow_dimensions=True) as encoder:
        response = await encoder.http.post("/v1/embeddings", json=body)
    assert response.status_code == 200, response.text
    spec.check("CreateEmbeddingResponse", response.json())
    assert list(spec.validator("CreateEmbeddingResponse").iter_errors({"data": [{}]}))


async def test_embeddings_in_base64_have_the_schema_but_for_the_vectors(
    model: Path, spec: OpenAISpec
) -> None:
    """The schema knows vectors only as lists, although the request may choose base64."""
    async with serving(FakeEncoder(lambda request: []), model) as encoder:
        fields = {"input": ["a", "b"], "encoding_format": "base64"}
        response = (await encoder.http.post("/v1/embeddings", json=fields)).json()
    for entry in response["data"]:
        assert isinstance(entry["embedding"], str)
        entry["embedding"] = []
    spec.check("CreateEmbeddingResponse", response)


async def test_models_have_the_schema(served: Served, spec: OpenAISpec) -> None:
    spec.check("ListModelsResponse", (await served.http.get("/v1/models")).json())
    model = (await served.http.get("/v1/models/tiny")).json()
    spec.check("Model", model)
    check_every_fault_is_seen(spec, "Model", model)


# ---- errors ----------------------------------------------------------------------------------


async def test_error_of_each_status_has_the_schema(
    model: Path, tmp_path: Path, says: Any, spec: OpenAISpec
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("free\nslow requests_per_minute=1\n")
    engine = FakeEngine(says("x"))
    path = "/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    slow = {"authorization": "Bearer slow"}
    found: list[httpx2.Response] = []
    async with serving(engine, model, "free", api_key_file=str(keys)) as served:
        http = served.http
        found.append(await http.post(path, json={}))
        found.append(
            await http.post(path, content=b"{", headers={"content-type": "application/json"})
        )
        found.append(await http.post(path, json=body, headers={"authorization": "Bearer no"}))
        found.append(await http.post(path, json={**body, "model": "gpt"}))
        found.append(await http.get("/v1/models/gpt"))
        found.append(await http.get("/v1/nothing"))
        found.append(await http.get(path))
        found.append(await http.post(path, content=b"x"))
        await http.post(path, json=body, headers=slow)
        found.append(await http.post(path, json=body, headers=slow))
        engine.reject = RequestRejectedError("context_length_exceeded", "long", param="messages")
        found.append(await http.post(path, json=body))
        engine.reject = None
        engine.script = lambda request: [NOT_FINITE]
        found.append(await http.post(path, json=body))
        engine.overloaded = True
        found.append(await http.post(path, json=body))
    statuses = [response.status_code for response in found]
    assert statuses == [400, 400, 401, 404, 404, 404, 405, 415, 429, 400, 500, 503]
    for response in found:
        spec.check(ERROR, response.json())
        assert list(spec.validator(ERROR).iter_errors({"error": {"message": "x"}}))


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_error_inside_a_stream_has_the_schema(
    model: Path, spec: OpenAISpec, path: str
) -> None:
    engine = FakeEngine(lambda request: [1, 2, NOT_FINITE])
    async with serving(engine, model) as served:
        body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "stream": True}
        response = await served.http.post(path, json=body)
    *_, last, rest = response.text.split("\n\n")
    assert rest == ""
    spec.check(ERROR, json.loads(last.removeprefix("data: ")))
