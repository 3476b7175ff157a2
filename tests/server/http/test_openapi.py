"""openapi.json must match the served API, because clients are generated from it."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import BaseModel

from server.app import PATHS
from server.http.openapi_app import OpenApiApp, up_to
from tests.support.fake_engine import FakeEngine
from tests.support.rig import serving

STREAMING = ("completions", "/responses", "messages", "/completion", "/infill", "/ablate")
BINARY = ("/v1/embeddings", "/pooling")
LINES = ("/api/chat", "/api/generate", "/api/pull")
HI = [{"role": "user", "content": "Hi"}]
OTHER_KINDS = {
    "/metrics": "text/plain",
    "/v1/files/{file_id}/content": "application/octet-stream",
}


@pytest.fixture(scope="module")
def fetched() -> dict[str, Any]:
    """The document, empty until the first test fetches it: a server takes 0.2 s to write it."""
    return {}


@pytest.fixture
async def document(served, fetched: dict[str, Any]) -> dict[str, Any]:
    if not fetched:
        fetched.update((await served.http.get("/openapi.json")).json())
    return fetched


def references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(target := node.get("$ref"), str):
            yield target
        node = list(node.values())
    for inner in node if isinstance(node, list) else ():
        yield from references(inner)


def operations(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    paths = document["paths"]
    return {(path, verb): what for path in paths for verb, what in paths[path].items()}


def fits(document: dict[str, Any], schema: dict[str, Any], value: Any) -> bool:
    return validator(json.dumps({**schema, "components": document["components"]})).is_valid(value)


@functools.cache
def validator(text: str) -> Draft202012Validator:
    schema = json.loads(text)
    Draft202012Validator.check_schema(schema)
    return Draft202012Validator(schema)


async def test_openapi_document_covers_every_route_and_reference(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    other_names = {
        "/score",
        "/rerank",
        "/classify",
        "/ping",
        "/models",
        "/responses",
        "/embeddings",
    }
    other_names |= {"/chat/completions", "/completions", "/chat/completions/input_tokens"}
    assert set(document["paths"]) == {p.replace(":path", "") for p in PATHS} - other_names
    for (path, verb), operation in operations(document).items():
        assert operation["responses"].keys() - {"503"} == {"200", "default"}, (path, verb)
        assert operation["description"], path
    assert "$defs" not in str(document)
    targets = set(references(document))
    assert len(targets) > 3
    for target in targets:
        node = document
        for step in target.removeprefix("#/").split("/"):
            node = node[step]
        Draft202012Validator.check_schema({**node, "components": document["components"]})


CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
RESPOND = "/v1/responses"
ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}}
MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
SHORT = {"messages": HI, "max_tokens": 3}
WEATHER = {"name": "weather", "input_schema": {"type": "object"}}
USES = {"type": "tool_use", "id": "1", "name": "weather", "input": {}}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "a"}]}


def said(role: str, *blocks: Any) -> dict[str, Any]:
    """Return a body for /v1/messages with one message of these blocks before the question."""
    return {"messages": [{"role": role, "content": [*blocks]}, *HI], "max_tokens": 3}


CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
SAID = {"role": "assistant", "content": "a"}


@pytest.mark.parametrize(
    ("path", "status", "bodies"),
    [
        (CHAT, 200, [{"messages": HI}, {"messages": HI, "n": 2.0, "seed": -3.0}]),
        (CHAT, 200, [{"messages": HI, "seed": 2**63}, {"messages": HI, "seed": -(2**63)}]),
        (CHAT, 200, [{"messages": HI, "logprobs": True, "top_logprobs": 2}]),
        (CHAT, 200, [{"messages": HI, "logprobs": None, "top_logprobs": 0}]),
        (CHAT, 200, [{"messages": [{"role": "assistant", "tool_calls": [CALL]}, *HI]}]),
        (CHAT, 200, [{"messages": [*HI, SAID], "continue_final_message": True}]),
        (CHAT, 200, [{"messages": HI, "prompt_logprobs": False, "stream": True}]),
        (CHAT, 200, [{"messages": HI, "logit_bias": {"0": 1, "99": 1, "257": -1.5}}]),
        (CHAT, 400, [{}, {"messages": []}, {"messages": [{"role": "user", "content": 5}]}]),
        (
            CHAT,
            400,
            [{"messages": [{"role": role}]} for role in ("user", "tool", "system", "function")],
        ),
        (CHAT, 400, [{"messages": [{"role": "user", "tool_calls": [CALL]}]}]),
        (CHAT, 200, [{"messages": [{"role": "assistant", "tool_calls": []}, *HI]}]),
        (CHAT, 200, [{"messages": [{"role": "assistant", "content": None}, *HI]}]),
        (CHAT, 200, [{"messages": HI, "chat_template_kwargs": {"a": [1, {"b": None}]}}]),
        (CHAT, 400, [{"messages": HI, "chat_template_kwargs": {"tools": []}}]),
        (CHAT, 400, [{"messages": HI, "chat_template_kwargs": {"a b": 1}}]),
        (CHAT, 400, [{"messages": [{"role": "assistant", "tool_calls": [{"function": {}}]}]}]),
        (CHAT, 400, [{"messages": HI, "stream_options": {"include_usage": 1}}]),
        (CHAT, 400, [{"messages": HI, "temperature": 3}, {"messages": HI, "n": 1.5}]),
        (CHAT, 400, [{"messages": HI, "n": True}, {"messages": HI, "n": "1"}]),
        (
            CHAT,
            400,
            [{"messages": HI, "seed": seed} for seed in (2**63 + 1, 2**70, -(2**63) - 999)],
        ),
        (CHAT, 400, [{"messages": HI, "top_logprobs": 1}]),
        (CHAT, 400, [{"messages": HI, "logprobs": False, "top_logprobs": 1}]),
        (CHAT, 400, [{"messages": HI, "stream": True, "prompt_logprobs": 0}]),
        (CHAT, 200, [{"messages": HI, "stream": False, "stream_options": None}]),
        (CHAT, 200, [{"messages": HI, "stream": True, "stream_options": {"include_usage": True}}]),
        (
            CHAT,
            400,
            [{"messages": HI, "stream": value, "stream_options": {}} for value in (None, False)],
        ),
        (COMPLETE, 400, [{"prompt": "a", "stream_options": {"include_usage": True}}]),
        (CHAT, 400, [{"messages": HI, "logit_bias": {key: 1}} for key in ("258", "07", "-1", "")]),
        (CHAT, 400, [{"messages": HI, "logit_bias": {"1": 101}}]),
        (
            CHAT,
            400,
            [
                {
                    "messages": [*HI, SAID],
                    "continue_final_message": True,
                    "add_generation_prompt": True,
                }
            ],
        ),
        (COMPLETE, 200, [{"prompt": "Hi", "max_tokens": 3}, {"prompt": ""}, {"prompt": [257]}]),
        (COMPLETE, 200, [{"prompt": "a", "max_tokens": 0, "echo": True}]),
        (COMPLETE, 200, [{"prompt": "a", "max_tokens": 0, "prompt_logprobs": 0}]),
        (COMPLETE, 200, [{"prompt": [[1], [2.0]]}]),
        (COMPLETE, 400, [{"prompt": [1, "a"]}, {"prompt": []}, {"prompt": [[]]}, {}]),
        (COMPLETE, 400, [{"prompt": [258]}, {"prompt": [[1], [258]]}, {"prompt": [-1]}]),
        (COMPLETE, 400, [{"prompt": "a", "max_tokens": 0}]),
        (COMPLETE, 400, [{"prompt": "a", "max_tokens": 0, "echo": None, "prompt_logprobs": None}]),
        (RESPOND, 200, [{"input": "Hi"}, {"input": HI}, {"input": "", "top_logprobs": 2.0}]),
        (RESPOND, 200, [{"input": [{"type": "reasoning", "summary": []}, *HI]}]),
        (RESPOND, 200, [{"input": "a", "tools": [ADD, {"type": "mcp"}], "tool_choice": "none"}]),
        (RESPOND, 200, [{"input": "a", "tools": [ADD], "tool_choice": ADD}]),
        (RESPOND, 200, [{"input": "a", "text": {"format": {"type": "json_object"}}}]),
        (RESPOND, 200, [{"input": "a", "metadata": {"a": "b"}, "reasoning": {"effort": "low"}}]),
        (RESPOND, 400, [{}, {"input": []}, {"input": [1]}, {"input": [{"role": "user"}]}]),
        (RESPOND, 400, [{"input": [{"role": "user", "content": [{"type": "input_image"}]}]}]),
        (RESPOND, 400, [{"input": [{"type": "function_call", "call_id": "c", "name": "f"}]}]),
        (RESPOND, 400, [{"input": [{"type": "computer_call"}]}, {"input": [{"role": "tool"}]}]),
        (RESPOND, 400, [{"input": "a", "tools": [{"type": "function"}]}]),
        (RESPOND, 400, [{"input": "a", "tools": [ADD], "tool_choice": {"type": "mcp"}}]),
        (RESPOND, 400, [{"input": "a", "text": {"format": {"type": "json_schema"}}}]),
        (RESPOND, 400, [{"input": "a", "metadata": {"a": 1}}, {"input": "a", "include": ["x"]}]),
        (MESSAGES, 200, [SHORT, SHORT | {"system": [{"type": "text", "text": "a"}]}]),
        (MESSAGES, 200, [SHORT | {"tools": [WEATHER], "tool_choice": {"type": "none"}}]),
        (MESSAGES, 200, [said("assistant", USES), said("user", RESULT), said("user")]),
        (MESSAGES, 200, [said("assistant", {"type": "redacted_thinking", "data": "x"})]),
        (MESSAGES, 200, [SHORT | {"thinking": {"type": "enabled", "budget_tokens": 9}}]),
        (MESSAGES, 400, [{"messages": HI}, {"max_tokens": 3}, {"messages": [], "max_tokens": 3}]),
        (MESSAGES, 400, [SHORT | {"temperature": 2.5}, SHORT | {"max_tokens": -1}]),
        (MESSAGES, 200, [SHORT | {"max_tokens": 0}]),
        (MESSAGES, 400, [said("user", USES), said("assistant", RESULT), said("system", RESULT)]),
        (MESSAGES, 400, [said("user", {"type": "image", "source": {}}), said("user", {}, 5)]),
        (MESSAGES, 400, [said("user", {**RESULT, "content": [{"type": "image"}]})]),
        (MESSAGES, 400, [SHORT | {"system": [{"type": "image"}]}, SHORT | {"system": 5}]),
        (MESSAGES, 400, [SHORT | {"tools": [{**WEATHER, "type": "bash_20250124"}]}]),
        (MESSAGES, 400, [SHORT | {"tools": [{**WEATHER, "name": "a b"}]}]),
        (MESSAGES, 400, [SHORT | {"tool_choice": {"type": "any"}}]),
        (
            MESSAGES,
            400,
            [SHORT | {"tools": [], "tool_choice": {"type": "tool", "name": "weather"}}],
        ),
        (MESSAGES, 400, [SHORT | {"tools": [WEATHER], "tool_choice": {"type": "tool"}}]),
        (MESSAGES, 200, [SHORT | {"thinking": {"type": "between_tools"}}]),
        (MESSAGES, 400, [SHORT | {"thinking": {"type": "sometimes"}}]),
        (COUNT, 200, [{"messages": HI}, {"messages": HI, "tools": [WEATHER]}]),
        (COUNT, 400, [{}, {"messages": HI, "tool_choice": {"type": "any"}}]),
        ("/tokenize", 200, [{"prompt": "Hi"}, {"messages": HI}, {"prompt": "", "messages": None}]),
        ("/tokenize", 400, [{}, {"prompt": None}, {"prompt": "Hi", "messages": HI}]),
        ("/tokenize", 400, [{"prompt": "Hi", "continue_final_message": True}]),
        ("/detokenize", 200, [{"tokens": [5, 6]}, {"tokens": []}]),
        ("/detokenize", 400, [{"tokens": ["a"]}, {"tokens": [258]}, {}]),
    ],
)
@pytest.mark.variants(40)
async def test_body_schema_accepts_the_same_bodies_as_server(
    served, document, path, status, bodies
) -> None:
    operation = document["paths"][path]["post"]
    content = operation["requestBody"]["content"]["application/json"]
    refusal = operation["responses"]["default"]["content"]["application/json"]
    for body in bodies:
        answer = await served.http.post(path, json=body)
        assert answer.status_code == status, (body, answer.text)
        assert fits(document, content["schema"], body) == (status == 200), body
        if status == 400:
            assert fits(document, refusal["schema"], answer.json())


@pytest.mark.parametrize("limit", [0, 1, 7, 9, 10, 19, 20, 99, 100, 257, 2047, 2048, 49151, 10**5])
def test_up_to_matches_exactly_the_numbers_to_the_limit(limit: int) -> None:
    pattern = re.compile(up_to(limit))
    found = [n for n in range(20 * limit + 200) if pattern.fullmatch(str(n))]
    assert found == list(range(limit + 1))
    assert not pattern.fullmatch("00")


async def test_openapi_knows_the_token_ids_only_after_loading(model, says) -> None:
    """Before, the document is served too, without the model's limits."""
    engine = FakeEngine(says("x"))
    async with serving(engine, model) as served:
        info, engine.info = engine.info, None
        tokens = await token_ids(served)
        assert tokens["maximum"] == 2**31 - 1
        engine.info = info
        assert (await token_ids(served))["maximum"] == info.vocab_size - 1


def test_start_makes_no_schema_of_a_body() -> None:
    """Those of all bodies take a fifth of the start of the server's process."""
    ran = subprocess.run([sys.executable, "-c", SCHEMAS], stdout=subprocess.PIPE, check=True)
    before, after = map(int, ran.stdout.split())
    assert before == 0
    assert after > 20


SCHEMAS = """
import server.http.openapi as openapi

made, schema_of = [], openapi._schema_of
openapi._schema_of = lambda kind: made.append(kind) or schema_of(kind)
from server.app import api_document

before = len(made)
api_document()
print(before, len(made))
"""


class Inner(BaseModel):
    count: int


class Answer(BaseModel):
    inner: Inner


def test_openapi_has_the_model_of_a_typed_answer() -> None:
    app = OpenApiApp(keyed=False, vocab_size=lambda: None)

    @app.get("/typed")
    async def typed() -> Answer:
        return Answer(inner=Inner(count=1))

    document = app.openapi()
    found = document["paths"]["/typed"]["get"]["responses"]["200"]["content"]["application/json"]
    assert fits(document, found["schema"], {"inner": {"count": 1}})
    assert not fits(document, found["schema"], {"inner": {}})


async def token_ids(served: Any) -> Any:
    document = (await served.http.get("/openapi.json")).json()
    content = document["paths"]["/detokenize"]["post"]["requestBody"]["content"]
    return content["application/json"]["schema"]["properties"]["tokens"]["items"]


async def test_openapi_content_types_match_responses(served, document) -> None:
    for (path, verb), operation in operations(document).items():
        kinds = set(operation["responses"]["200"]["content"])
        assert ("text/event-stream" in kinds) == path.endswith(STREAMING), path
        other = OTHER_KINDS.get(path, "application/json")
        if path in BINARY:
            kinds.remove("application/octet-stream")
        if path in LINES:
            kinds.remove("application/x-ndjson")
        assert kinds - {"text/event-stream"} == {other}
        if verb == "get" and "{" not in path:
            kind = (await served.http.get(path)).headers["content-type"].partition(";")[0]
            assert kind in kinds, path


@pytest.mark.parametrize("keys", [(), ("alpha",)])
async def test_openapi_security_matches_routes_that_need_a_key(model, says, keys) -> None:
    headers = {"authorization": f"Bearer {keys[0]}"} if keys else {}
    async with serving(FakeEngine(says("x")), model, api_key=keys) as served:
        document = (await served.http.get("/openapi.json", headers=headers)).json()
        assert ("securitySchemes" in document["components"]) == bool(keys)
        for (path, verb), operation in operations(document).items():
            needed = operation.get("security", document.get("security", []))
            if verb == "get":
                status = (await served.http.get(re.sub("{.*?}", "x", path))).status_code
                assert (status == 401) == bool(needed), path
