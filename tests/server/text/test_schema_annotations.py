"""Annotations never refuse a schema; assertions that cannot be followed do so by name."""

from __future__ import annotations

from typing import Any

import pytest

from server.text.guided_schema import guided
from server.text.schema_annotations import FORMATS
from tests.support.grammars import accepted, matcher_of

STANDARD = (
    *("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname"),
    *("ipv4", "ipv6", "uri", "uri-reference", "iri", "iri-reference", "uuid", "uri-template"),
    *("json-pointer", "relative-json-pointer", "regex"),
)
OTHERS = (
    *("path", "password", "binary", "json-string", "byte", "int32", "int64", "float", "double"),
    *("base64", "file-path", "directory-path", "unknown", "made up", ""),
)
RIGHT = {
    "date-time": "2026-11-28T22:00:00Z",
    "date": "2026-11-28",
    "time": "22:00:00Z",
    "duration": "P1D",
    "email": "a@b.de",
    "hostname": "example.org",
    "ipv4": "127.0.0.1",
    "ipv6": "::1",
    "uri": "https://example.org/",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


@pytest.mark.parametrize("name", [*STANDARD, *OTHERS])
def test_format_is_enforced_if_known_and_ignored_otherwise(name: str) -> None:
    answers = ['"no such format!"', f'"{RIGHT.get(name, "x")}"']
    found = accepted({"type": "string", "format": name}, answers)
    assert found == (answers[1:] if name in FORMATS else answers)
    assert accepted({"anyOf": [{"format": name}]}, ["3"]) == ["3"]


def test_known_formats_are_those_of_the_library() -> None:
    """A new version of llguidance may know more formats."""
    from llguidance import LLMatcher

    from tests.support.grammars import byte_tokenizer

    known = set()
    for name in STANDARD:
        source = LLMatcher.grammar_from_json_schema({"type": "string", "format": name})
        if not LLMatcher(byte_tokenizer(), source, log_level=0).is_error():
            known.add(name)
    assert known == FORMATS.keys()


ANNOTATIONS: list[dict[str, Any]] = [
    {"title": "T", "description": "D", "default": 3, "examples": [1], "$comment": "c"},
    {"deprecated": True, "readOnly": True, "writeOnly": False},
    {"contentEncoding": "base64", "contentMediaType": "text/plain", "contentSchema": {"not": {}}},
    {"x-order": 3, "strict": True, "nullable": True, "xml": {}, "externalDocs": {"url": "a"}},
    {"discriminator": {"propertyName": "a"}, "example": {"a": 1}, "$vocabulary": {}},
    {"$schema": "https://json-schema.org/draft/2020-12/schema"},
    {"$schema": "https://json-schema.org/draft-07/schema"},
    {"$schema": "http://json-schema.org/draft-07/schema#"},
    {"$schema": "http://json-schema.org/draft-04/schema"},
    {"$schema": "http://json-schema.org/draft/2020-12/schema"},
    {"$schema": "http://json-schema.org/schema#"},
    {"$schema": "https://spec.openapis.org/oas/3.1/dialect/base"},
    {"$schema": "my own", "$id": "https://example.org/s.json"},
    {"$defs": {"A": {"type": "string", "format": "path"}}, "definitions": {}},
    {"$dynamicAnchor": "a", "$recursiveAnchor": True, "$anchor": "b"},
    {"then": {"type": "string"}, "else": False},
    {"if": {"type": "string"}},
    {"minContains": 2, "maxContains": 3},
    {"uniqueItems": False, "propertyNames": {"type": "string"}, "unevaluatedItems": True},
    {"unevaluatedProperties": {}, "dependentRequired": {}, "dependencies": {}},
    {"dependentSchemas": {}, "minItems": 0.0, "maxLength": 3.0},
    {"minimum": -1.7976931348623157e308, "maximum": 1.7976931348623157e308},
]


@pytest.mark.parametrize("annotations", ANNOTATIONS, ids=lambda given: ", ".join(given))
def test_annotation_refuses_nothing_at_any_place(annotations: dict[str, Any]) -> None:
    integer = {"type": "integer", **annotations}
    assert accepted(integer, ["3", '"a"']) == ["3"]
    inside = {"type": "object", "properties": {"a": {"type": "array", "items": integer}}}
    assert accepted(inside, ['{"a":[3]}', '{"a":["b"]}']) == ['{"a":[3]}']
    defined = {"$ref": "#/definitions/A", "definitions": {"A": integer}}
    assert accepted(defined, ["3", '"a"']) == ["3"]


@pytest.mark.parametrize(
    ("keyword", "value"),
    [
        ("not", {"type": "string"}),
        ("uniqueItems", True),
        ("contains", {"type": "string"}),
        ("propertyNames", {"pattern": "^a"}),
        ("dependentRequired", {"a": ["b"]}),
        ("dependentSchemas", {"a": {"required": ["b"]}}),
        ("dependencies", {"a": ["b"]}),
        ("unevaluatedProperties", False),
        ("unevaluatedItems", False),
        ("$dynamicRef", "#a"),
    ],
)
def test_assertion_that_cannot_be_followed_is_refused_by_name(keyword: str, value: Any) -> None:
    for schema in ({keyword: value}, {"type": "array", "items": {"title": "T", keyword: value}}):
        matcher = matcher_of(schema)
        assert matcher.is_error()
        assert f'"{keyword}"' in matcher.get_error()


def test_conditions_that_assert_something_are_refused_by_name() -> None:
    schema = {"if": {"type": "string"}, "then": {"maxLength": 3}, "contains": {}, "minContains": 0}
    error = matcher_of(schema).get_error()
    assert all(f'"{name}"' in error for name in ("if", "then", "contains", "minContains"))


def test_reference_to_a_dynamic_anchor_or_into_an_unknown_keyword_is_followed() -> None:
    anchored = {"$ref": "#a", "$defs": {"A": {"$dynamicAnchor": "a", "type": "integer"}}}
    assert accepted(anchored, ["3", '"a"']) == ["3"]
    path = {"type": "string", "format": "path"}
    foreign = {"$ref": "#/components/schemas/A", "components": {"schemas": {"A": path}}}
    assert accepted(foreign, ["3", '"a b"']) == ['"a b"']


def test_names_of_properties_and_values_are_no_keywords() -> None:
    schema = {
        "type": "object",
        "properties": {"format": {"const": {"format": "path"}}, "then": {"type": "integer"}},
        "required": ["format", "then"],
    }
    before = repr(schema)
    answer = '{"format":{"format":"path"},"then":3}'
    assert accepted(schema, [answer, '{"format":{},"then":3}']) == [answer]
    guided(schema, {})
    assert repr(schema) == before, "the request's own schema is not changed"


# Of zod 4 (`z.toJSONSchema`) and pydantic 2, as their clients send them.
CLIENTS: list[tuple[dict[str, Any], str, str]] = [
    (
        {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "propertyNames": {"type": "string"},
            "additionalProperties": {"type": "number"},
        },
        '{"a":1.5}',
        '{"a":"b"}',
    ),
    (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "type": "string",
            "format": "base64url",
            "contentEncoding": "base64url",
            "pattern": "^[A-Za-z0-9_-]*$",
        },
        '"ab-_"',
        '"a b"',
    ),
    (
        {
            "type": "integer",
            "minimum": -9007199254740991,
            "maximum": 9007199254740991,
            "format": "int32",
        },
        "9007199254740991",
        "9007199254740992",
    ),
    (
        {"title": "Secret", "type": "string", "format": "password", "writeOnly": True},
        '"a"',
        "1",
    ),
    (
        {"contentMediaType": "application/json", "contentSchema": {}, "type": "string"},
        '"{}"',
        "{}",
    ),
]


@pytest.mark.parametrize(("schema", "right", "wrong"), CLIENTS)
def test_schemas_of_zod_and_pydantic_are_followed(
    schema: dict[str, Any], right: str, wrong: str
) -> None:
    assert accepted(schema, [right, wrong]) == [right]
