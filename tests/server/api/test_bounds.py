"""Every string, list and object of every request schema has a largest size."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pydantic
import pytest

import server.app  # noqa: F401 - imports the schemas of all routes
from server.http.body import MAX_NAME, MAX_SMALL, Part
from server.http.query import Query
from tests.support.rig import Served
from tests.support.wings import absent_wings

# Their fields choose the schema by which the body, or each object in it, is validated next.
CHOOSING = {"InvocationBody", "PredictBody"}
BEFORE = ("function-before", "function-wrap")


def descendants(kind: type[Any]) -> Iterator[type[Any]]:
    for child in kind.__subclasses__():
        yield child
        yield from descendants(child)


SCHEMAS = sorted(
    {kind for root in (Part, Query) for kind in descendants(root) if "server." in kind.__module__},
    key=lambda kind: (kind.__module__, kind.__name__),
)


def unbounded(schema: dict[str, Any], path: str, most: int | None, checked: bool) -> Iterator[str]:
    """Yield the places of a schema whose values may have any size.

    `most` is the length of a string without a limit of its own. `checked` is whether a function has
    seen the value before.
    """
    kind = schema.get("type")
    if kind in ("model", "definition-ref"):
        return  # a schema of its own
    if kind == "str" and not schema.get("max_length") and not most:
        yield f"{path}: string"
    is_open = schema.get("max_length") is None
    if kind == "list" and is_open:
        yield f"{path}: list"
    if (kind == "dict" and is_open and not checked) or (kind == "any" and not checked):
        yield f"{path}: {kind}"
    checked = checked or kind in BEFORE
    for name, inner in schema.items():
        if name in ("serialization", "metadata", "json_schema_input_schema"):
            continue
        entries = inner.values() if isinstance(inner, dict) and name == "choices" else [inner]
        if isinstance(inner, list):
            entries = [entry[0] if isinstance(entry, tuple) else entry for entry in inner]
        for entry in entries:
            if isinstance(entry, dict) and "type" in entry:
                yield from unbounded(entry, f"{path}.{name}", most, checked)


def fields_of(schema: dict[str, Any]) -> dict[str, Any]:
    while schema["type"] != "model-fields":
        schema = schema["schema"]
    return schema["fields"]


def problems_of(kind: type[pydantic.BaseModel]) -> list[str]:
    most = kind.model_config.get("str_max_length")
    found = []
    for name, field in fields_of(kind.__pydantic_core_schema__).items():
        found += unbounded(field, f"{kind.__name__}.{name}", most, checked=False)
    return found


@pytest.mark.parametrize("kind", SCHEMAS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_schema_bounds_every_string_list_and_object(kind: type[pydantic.BaseModel]) -> None:
    found = problems_of(kind)
    if kind.__name__ in CHOOSING:
        found = [problem for problem in found if not problem.endswith((": any", ": dict"))]
    assert not found


def test_schemas_of_all_apis_are_checked() -> None:
    folders = {
        kind.__module__.removeprefix("server.api.").removeprefix("server.") for kind in SCHEMAS
    }
    packages = {folder.split(".")[0] for folder in folders}
    assert packages >= {"openai", "responses", "anthropic"}
    assert packages >= {"cohere", "llamacpp", "vllm", "glassbox", "batch"} - set(absent_wings())


def test_unbounded_fields_are_found() -> None:
    class Open(pydantic.BaseModel):
        text: str
        numbers: list[int] | None = None
        values: dict[str, int]
        anything: Any

    places = ["text: string", "numbers.schema.schema: list", "values: dict", "anything: any"]
    found = problems_of(Open)
    assert len(found) == len(places) + 1  # the keys of `values`, too
    for place in ("text", "numbers", "values", "anything"):
        assert any(f"Open.{place}" in problem for problem in found)


LONG = "x" * (MAX_NAME + 1)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TOOL: dict[str, Any] = {"name": "f", "description": "x" * (MAX_SMALL // 8), "parameters": {}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", CHAT | {"user": LONG}, "user"),
        ("/v1/chat/completions", CHAT | {"prompt_cache_key": LONG}, "prompt_cache_key"),
        ("/v1/chat/completions", CHAT | {"safety_identifier": LONG}, "safety_identifier"),
        ("/v1/chat/completions", CHAT | {"metadata": {"a": 99 * LONG}}, "metadata"),
        ("/v1/chat/completions", CHAT | {"stop": ["a"] * 99}, "stop"),
        (
            "/v1/chat/completions",
            CHAT | {"tools": [{"type": "function", "function": TOOL}] * 9},
            "tools",
        ),
        ("/v1/completions", {"prompt": "a", "user": LONG}, "user"),
        ("/v1/responses", {"input": "a", "user": LONG}, "user"),
        ("/v1/responses", {"input": "a", "prompt_cache_key": LONG}, "prompt_cache_key"),
        ("/v1/responses", {"input": "a", "safety_identifier": LONG}, "safety_identifier"),
        ("/v1/responses", {"input": "a", "tools": [{"type": "function", **TOOL}] * 9}, "tools"),
        (
            "/v1/messages",
            CHAT
            | {
                "max_tokens": 5,
                "tools": [
                    {"name": "f", "description": TOOL["description"], "input_schema": {}},
                ]
                * 9,
            },
            "tools",
        ),
    ],
)
async def test_field_beyond_its_bound_is_refused_by_name(
    served: Served, path: str, body: dict[str, Any], param: str
) -> None:
    answer = await served.http.post(path, json=body)
    assert answer.status_code == 400
    assert param in answer.text


async def test_texts_may_be_longer_than_names(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "a " * MAX_NAME}]}
    answer = await served.http.post("/v1/chat/completions", json=body)
    assert answer.status_code in (200, 400)
    assert "at most" not in answer.text
