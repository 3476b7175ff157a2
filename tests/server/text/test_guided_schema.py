"""Schemas without free members: every answer that they allow is valid, and there still is one."""

from __future__ import annotations

from typing import Any

import pytest

from server.text.guided_schema import guided

OPTIONS = {"x-guidance": {}}
NAME = {"name": {"type": "string"}}
OPEN = {"type": "object", "properties": NAME}
CLOSED = {**OPEN, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        (OPEN, CLOSED),
        ({"type": "object", "properties": {}}, {**CLOSED, "properties": {}}),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": CLOSED}),
        ({"items": [OPEN, True]}, {"items": [CLOSED, True]}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        (
            {"$ref": "#/$defs/A", "$defs": {"A": OPEN}},
            {"$ref": "#/$defs/A", "$defs": {"A": CLOSED}},
        ),
        ({"additionalProperties": OPEN}, {"additionalProperties": CLOSED}),
        (
            {"properties": {"properties": OPEN}},
            {"properties": {"properties": CLOSED}, "additionalProperties": False},
        ),
    ],
)
def test_closed_objects_have_only_their_own_members(schema: Any, expected: Any) -> None:
    before = repr(schema)
    assert guided(schema, {}) == expected | OPTIONS
    assert repr(schema) == before, "the request's own schema is not changed"


@pytest.mark.parametrize(
    "schema",
    [
        CLOSED,
        {"type": "object"},
        {**OPEN, "additionalProperties": {"type": "integer"}},
        {**OPEN, "required": ["other"]},
        {**OPEN, "minProperties": 2},
        {**OPEN, "patternProperties": {"^x": True}},
        {"allOf": [OPEN, {"properties": {"age": {"type": "integer"}}}]},
        {**OPEN, "anyOf": [{"required": ["age"]}]},
        {**OPEN, "$ref": "#/$defs/A", "$defs": {"A": {"properties": {"b": True}}}},
        {"if": OPEN, "then": OPEN},
        {"properties": [], "required": 3},
        {"enum": [{"properties": {}}], "default": {"properties": {}}},
    ],
)
def test_schema_that_could_forbid_every_answer_is_not_changed(schema: Any) -> None:
    assert guided(schema, {}) == schema | OPTIONS


@pytest.mark.parametrize("required", [[["name"]], [{}], [None], ["name", []], None, 1, {"name": 1}])
@pytest.mark.parametrize("is_bounded", [False, True])
def test_required_without_a_list_of_names_is_left_to_the_library(
    required: Any, is_bounded: bool
) -> None:
    made = guided({**OPEN, "required": required}, {}, is_bounded=is_bounded)
    assert (made["required"], made["properties"]) == (required, NAME)
    assert "maxProperties" not in made
