"""openapi.json must match the served API, because clients are generated from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from server.app import PATHS
from tests.support.fake_engine import FakeEngine
from tests.support.rig import serving

HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def document(served) -> dict[str, Any]:
    return (await served.http.get("/openapi.json")).json()


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
    whole = {**schema, "components": document["components"]}
    Draft202012Validator.check_schema(whole)
    return Draft202012Validator(whole).is_valid(value)


async def test_openapi_document_covers_every_route_and_reference(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1")
    other_names = {"/score"}
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


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/chat/completions", {"messages": HI}, 200),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": 5}]}, 400),
        ("/v1/chat/completions", {"messages": HI, "stream_options": {"include_usage": 1}}, 400),
        ("/v1/chat/completions", {"messages": HI, "temperature": 3}, 400),
        ("/v1/chat/completions", {}, 400),
        ("/v1/completions", {"prompt": "Hi", "max_tokens": 3}, 200),
        ("/v1/completions", {"prompt": [1, "a"]}, 400),
        ("/tokenize", {"prompt": "Hi"}, 200),
        ("/detokenize", {"tokens": [5, 6]}, 200),
        ("/detokenize", {"tokens": ["a"]}, 400),
    ],
)
async def test_body_schema_accepts_the_same_bodies_as_server(served, document, path, body, status):
    answer = await served.http.post(path, json=body)
    assert answer.status_code == status
    operation = document["paths"][path]["post"]
    content = operation["requestBody"]["content"]["application/json"]
    assert fits(document, content["schema"], body) == (status == 200)
    refusal = operation["responses"]["default"]["content"]["application/json"]
    assert fits(document, refusal["schema"], answer.json()) == (status != 200)


async def test_openapi_content_types_match_responses(served, document) -> None:
    for (path, verb), operation in operations(document).items():
        kinds = set(operation["responses"]["200"]["content"])
        assert ("text/event-stream" in kinds) == path.endswith("completions"), path
        assert kinds - {"text/event-stream"} == (
            {"text/plain"} if path == "/metrics" else {"application/json"}
        )
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
                status = (await served.http.get(path.format(name="x"))).status_code
                assert (status == 401) == bool(needed), path
