"""Forced calls over sixteen classes of JSON schemas, in three call formats, streamed and whole.

The arguments are checked by `jsonschema`. The model is the demo's: it has not seen most of these
schemas, so only the grammar makes its arguments valid.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import jsonschema
import pytest

from tests.support.serve import Server, serving

TEMPLATES = Path(__file__).parents[1] / "data" / "chat-templates"
FORMATS = ("hermes", "qwen3_coder", "glm")  # JSON, and two with a tag for each argument
WORD = {"type": "string", "maxLength": 8}
COUNT = {"type": "integer", "minimum": 0, "maximum": 99}


def record(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object that needs all of these properties."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


TREE = record(
    name=WORD, children={"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2}
)
CLASSES: dict[str, dict[str, Any]] = {
    "nesting": record(a=record(b=record(c=record(d=WORD), e=COUNT))),
    "references": record(home={"$ref": "#/$defs/place"}, work={"$ref": "#/$defs/place"})
    | {"$defs": {"place": record(city=WORD, floor=COUNT)}},
    "anyOf": record(value={"anyOf": [COUNT, record(text=WORD), {"type": "null"}]}),
    "enums": record(unit={"enum": ["celsius", "kelvin", 7, None, True]}),
    "patterns": record(code={"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"}),
    "formats": record(
        day={"type": "string", "format": "date"},
        at={"type": "string", "format": "date-time"},
        id={"type": "string", "format": "uuid"},
        ip={"type": "string", "format": "ipv4"},
    ),
    "limits": record(
        share={"type": "number", "minimum": 0, "exclusiveMaximum": 1},
        year={"type": "integer", "minimum": -44, "maximum": 2026},
        even={"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 40},
    ),
    "nullable": record(note={"type": ["string", "null"], "maxLength": 5}, left=COUNT),
    "empty objects": record(nothing=record(), also=record()),
    "long lists": record(row={"type": "array", "items": COUNT, "minItems": 60, "maxItems": 64}),
    "unicode keys": record(**{"größe": COUNT, "名前": WORD, "a b": COUNT, 'q"': COUNT}),
    "additionalProperties": {
        "type": "object",
        "properties": {"known": COUNT},
        "required": ["known"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 4,
    },
    "const": record(kind={"const": "circle"}, radius=COUNT),
    "defaults": record(size=COUNT | {"default": 3}, name=WORD | {"default": "none"}),
    "recursion": record(root={"$ref": "#/$defs/tree"}) | {"$defs": {"tree": TREE}},
    "tuples": record(
        point={"type": "array", "prefixItems": [COUNT, COUNT, WORD], "items": False, "minItems": 3}
    ),
}


@pytest.fixture(
    scope="module",
    params=[FORMATS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FORMATS[1:])],
)
def served(request: pytest.FixtureRequest) -> Iterator[Server]:
    with serving("demo", "--chat-template", TEMPLATES / f"{request.param}.jinja") as server:
        yield server


def call(server: Server, schema: dict[str, Any], seed: int) -> str | None:
    """Return the arguments of a forced call, or None if it is cut; a stream must have the same."""
    function = {"name": "f", "parameters": schema}
    body = {
        "messages": [{"role": "user", "content": "Call it."}],
        "tools": [{"type": "function", "function": function}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "seed": seed,
        "temperature": 0.8,
        "frequency_penalty": 0.5,
        "max_tokens": 900,
    }
    with httpx2.Client(base_url=server.base_url, timeout=120) as client:
        whole = client.post("/v1/chat/completions", json=body)
        assert whole.status_code == 200, whole.text
        stream = client.post("/v1/chat/completions", json={**body, "stream": True}).text
    (choice,) = whole.json()["choices"]
    (made,) = choice["message"]["tool_calls"]
    lines = [line.removeprefix("data: ") for line in stream.split("\n\n") if "data: {" in line]
    parts = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    pieces = [piece for part in parts for piece in part.get("tool_calls") or ()]
    assert (
        "".join(piece["function"].get("arguments") or "" for piece in pieces)
        == (made["function"]["arguments"])
    )
    if choice["finish_reason"] == "length":
        return None
    assert choice["finish_reason"] in ("tool_calls", "stop"), choice
    assert made["function"]["name"] == "f"
    arguments: str = made["function"]["arguments"]
    return arguments


def check(server: Server, name: str, seeds: range) -> None:
    """Check that all arguments are valid, and that only endless recursion is cut."""
    schema = CLASSES[name]
    checker = jsonschema.Draft202012Validator.FORMAT_CHECKER
    validator = jsonschema.Draft202012Validator(schema, format_checker=checker)
    made = [call(server, schema, seed) for seed in seeds]
    for arguments in made:
        if arguments is None:
            assert name == "recursion"
        else:
            validator.validate(json.loads(arguments))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.slow
def test_forced_call_has_valid_arguments(served: Server, name: str) -> None:
    check(served, name, range(2))


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
def test_forced_calls_of_many_seeds_have_valid_arguments(served: Server, name: str) -> None:
    check(served, name, range(2, 8))
