"""Objects that a schema leaves open have few members more, so that a forced call ends."""

from __future__ import annotations

from typing import Any

import pytest

from server.text.schema_bounds import MOST_MEMBERS
from tests.support.grammars import accepted, byte_tokenizer, matcher_of

ANY: dict[str, Any] = {"type": "object"}
MOST, MORE = MOST_MEMBERS, MOST_MEMBERS + 1


def members(count: int, value: str = "1") -> str:
    return "{" + ",".join(f'"k{index}":{value}' for index in range(count)) + "}"


def holding(schema: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": schema}}


@pytest.mark.parametrize(
    ("schema", "answer"),
    [
        (ANY, "{}"),
        ({"type": ["object", "null"]}, "{}"),
        ({"type": "object", "additionalProperties": True}, "{}"),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, "{}"),
        ({}, "{}"),
        ({"description": "Any value."}, "{}"),
        (holding(ANY), '{"a":{}}'),
        (holding({}), '{"a":{}}'),
        (holding(True), '{"a":{}}'),
        (holding({"type": "array"}), '{"a":[{}]}'),
        (holding({"type": "array", "items": {}}), '{"a":[1,{}]}'),
        (holding({"anyOf": [ANY, {"type": "string"}]}), '{"a":{}}'),
        ({"type": "object", "additionalProperties": True}, '{"a":{}}'),
        ({"type": "object"}, '{"a":[{"b":{}}]}'),
        ({"$ref": "#/$defs/A", "$defs": {"A": ANY}}, "{}"),
        ({"$id": "https://example.org/s", "properties": {"a": ANY}, "type": "object"}, '{"a":{}}'),
    ],
)
def test_open_object_has_few_members_at_any_place(schema: Any, answer: str) -> None:
    reachable = [answer.replace("{}", members(count)) for count in (0, 1, MOST)]
    answers = [*reachable, answer.replace("{}", members(MORE))]
    assert accepted(schema, answers, is_bounded=True) == reachable
    assert accepted(schema, answers) == answers, "only forced calls are bounded"


def test_listed_members_do_not_count_and_keep_their_schemas() -> None:
    schema = {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days.max": {"type": "integer"},
            "size": {"type": "object"},
        },
        "required": ["city"],
        "additionalProperties": True,
    }
    city = '{"city":"x"'
    more = members(MOST)[1:]
    valid = [
        f"{city}}}",
        f'{city},"days.max":3}}',
        f'{city},"days.max":3,"note":"a"}}',
        f'{city},"note":"a"}}',
        f'{city},"size":{members(MOST)}}}',
        f'{city},"days.max":3,"size":{{}},{more}',
    ]
    invalid = ['{"note":"a"}', f'{city},"days.max":"x"}}', f'{city},"size":{members(MORE)}}}']
    assert accepted(schema, [*valid, *invalid], is_bounded=True) == valid


@pytest.mark.parametrize(
    ("schema", "most"),
    [
        ({"type": "object", "maxProperties": 40}, 40),
        ({"type": "object", "minProperties": 20}, 20 + MOST),
        ({"type": "object", "minProperties": 1, "maxProperties": 2}, 2),
    ],
)
def test_counts_of_the_schema_itself_hold(schema: Any, most: int) -> None:
    answers = [members(most), members(most + 1)]
    assert accepted(schema, answers, is_bounded=True) == answers[:1]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [ANY, {"properties": {"a": {"type": "integer"}}}]},
        {"type": "object", "anyOf": [{"required": ["a"]}, {"required": ["b"]}]},
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}},
        {
            "type": "object",
            "properties": {f"p{n}": {} for n in range(40)},
            "additionalProperties": {},
        },
        {"type": "object", "properties": {"a": {"$id": "b", "type": "object"}}},
    ],
)
def test_schema_that_cannot_be_bounded_still_has_answers(schema: Any) -> None:
    answer = '{"a":1}' if "$id" not in str(schema) else '{"a":{"b":2}}'
    assert accepted(schema, [answer], is_bounded=True) == [answer]


def test_model_that_always_adds_a_member_comes_to_an_end() -> None:
    """Short members, as many as the grammar allows: a comma, where one may stand."""
    matcher = matcher_of(holding(ANY) | {"required": ["a"]}, is_bounded=True)

    def takes(text: str) -> bool:
        tokens = byte_tokenizer().tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens)

    assert takes('{"a":{')
    count = 0
    has_comma = True
    while has_comma:
        assert takes('"b":1')
        count += 1
        assert count <= MOST
        has_comma = takes(",")
    assert count == MOST
    assert takes("}}")
    assert matcher.is_accepting()
