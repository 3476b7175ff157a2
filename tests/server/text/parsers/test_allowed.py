"""The types and values that a schema allows."""

from __future__ import annotations

import pytest

from server.text.parsers.allowed import ANY, allowed_values, allows, properties_of, required_names


@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        ({"type": "string"}, {"string": None}),
        ({"type": "number"}, {"number": None, "integer": None}),
        ({"type": ["integer", "null"]}, {"integer": None, "null": None}),
        ({"enum": ["a", 1, None]}, {"string": ("a",), "integer": (1,), "null": (None,)}),
        ({"type": "string", "enum": ["a", 1]}, {"string": ("a",)}),
        ({"type": "string", "enum": []}, {}),
        ({"const": True}, {"boolean": (True,)}),
        ({"anyOf": [{"const": "a"}, {"enum": ["b"]}]}, {"string": ("a", "b")}),
        ({"anyOf": [{"const": "a"}, {"type": "string"}]}, {"string": None}),
        ({"allOf": [{"enum": ["a", "b"]}, {"enum": ["b", "c"]}]}, {"string": ("b",)}),
        ({"oneOf": [{"type": "string"}, {}]}, ANY),
        ({"$ref": "#/$defs/a"}, {"integer": None}),
        ({"$ref": "#/$defs/a~1b"}, {"null": None}),
        ({"$ref": "#/$defs/loop"}, ANY),
        ({"$ref": "#/nowhere"}, ANY),
        ({"type": "unknown"}, ANY),
        ({"type": []}, ANY),
        ({}, ANY),
        (True, ANY),
        (None, ANY),
        (False, {}),
    ],
)
def test_schema_allows_types_and_values(schema, allowed) -> None:
    definitions = {
        "a": {"type": "integer"},
        "a/b": {"type": "null"},
        "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]},
    }
    assert allowed_values(schema, {"$defs": definitions}) == allowed


def test_references_that_double_are_read_in_bounded_time() -> None:
    definitions = {f"a{i}": {"anyOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(60)}
    assert allowed_values({"$ref": "#/$defs/a0"}, {"$defs": definitions}) == ANY


def test_true_is_not_the_number_one() -> None:
    assert not allows(allowed_values({"enum": [1]}, {}), True)
    assert not allows(allowed_values({"const": 1.5}, {}), 2)


def test_members_are_found_behind_references_and_all_of() -> None:
    root = {
        "$ref": "#/$defs/both",
        "$defs": {
            "both": {"allOf": [{"properties": {"a": {"type": "string"}}, "required": ["a"]},
                               {"properties": {"b": True}, "required": ["b", 3]}]},
        },
    }  # fmt: skip
    assert properties_of(root) == {"a": {"type": "string"}, "b": True}
    assert required_names(root) == ["a", "b"]
