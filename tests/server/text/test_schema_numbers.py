"""A number of a schema is held by the grammar with all its digits, or refused by name."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest

from server.text import exact_json
from server.text.guided_schema import guided
from tests.support.grammars import accepted

TWO_53 = 2**53


def refused(schema: dict[str, Any]) -> str:
    with pytest.raises(ValueError, match="cannot hold exactly") as caught:
        guided(schema, {})
    return str(caught.value)


@pytest.mark.parametrize(
    "number",
    ["0", "-7", "1.10", "0.1", "-0.25", "1e-7", "9007199254740991", "1152921504606846976", "1e15"],
)
@pytest.mark.parametrize("keyword", ["const", "enum"])
def test_number_that_a_grammar_holds_is_the_answer(number: str, keyword: str) -> None:
    value = exact_json.loads(number)
    in_full = f"{Decimal(number).normalize():f}"
    answers = [number, in_full, "123", f"1{in_full.lstrip('-')}"]
    schema = {keyword: [value] if keyword == "enum" else value}
    allowed = accepted(schema, answers)
    assert allowed, "no answer is left"
    assert {Decimal(answer) for answer in allowed} == {Decimal(number)}


@pytest.mark.parametrize(
    "number",
    [
        "1234567890123456789",
        "9007199254740993",
        "100000000000000000001",
        "18446744073709551616",
        "1e20",
        "0.1000000000000000055",
        "1E-400",
    ],
)
def test_const_or_enum_that_would_change_is_refused_by_name(number: str) -> None:
    value = exact_json.loads(number)
    shown = str(value)
    assert f"const has the number {shown}," in refused({"const": value})
    assert f"enum.1 has the number {shown}," in refused({"enum": ["a", value]})
    nested = {"type": "object", "properties": {"id": {"enum": [{"x": [value]}]}}}
    assert f"properties.id.enum.0.x.0 has the number {shown}," in refused(nested)
    behind = {"$ref": "#/$defs/A", "$defs": {"A": {"anyOf": [{"const": value}]}}}
    assert f"$defs.A.anyOf.0.const has the number {shown}," in refused(behind)


@pytest.mark.parametrize("kind", ["integer", "number"])
@pytest.mark.parametrize(
    ("keyword", "bound", "inside", "outside"),
    [
        ("minimum", TWO_53, TWO_53, TWO_53 - 1),
        ("maximum", TWO_53, TWO_53, TWO_53 + 1),
        ("exclusiveMinimum", TWO_53 - 1, TWO_53, TWO_53 - 1),
        ("exclusiveMaximum", TWO_53 - 1, TWO_53 - 2, TWO_53 - 1),
        ("exclusiveMinimum", -TWO_53 + 1, -TWO_53 + 2, -TWO_53 + 1),
        ("multipleOf", 10**7, 3 * 10**7, 3 * 10**7 + 1),
    ],
)
def test_bound_that_a_grammar_holds_separates_neighbours(
    kind: str, keyword: str, bound: int, inside: int, outside: int
) -> None:
    schema = {"type": kind, keyword: bound}
    assert accepted(schema, [str(inside), str(outside)]) == [str(inside)]


def test_largest_64_bit_integer_is_a_maximum() -> None:
    schema = {"type": ["integer", "null"], "maximum": 2**63 - 1}
    answers = [str(2**63 - 1), str(2**63), "null"]
    assert accepted(schema, answers) == [str(2**63 - 1), "null"]
    assert refused({**schema, "type": "number"})


@pytest.mark.parametrize(
    ("keyword", "bound"),
    [
        ("minimum", 1234567890123456789),
        ("maximum", 1234567890123456789),
        ("maximum", 2**64 - 1),
        ("minimum", -(2**64)),
        ("exclusiveMinimum", TWO_53),
        ("exclusiveMaximum", TWO_53 + 2),
        ("minimum", exact_json.number("0.1000000000000000055")),
        ("multipleOf", 1234567890123456789),
        ("multipleOf", 429496730),
        ("multipleOf", 0.07),
        ("multipleOf", 19.99),
    ],
)
def test_bound_that_would_change_is_refused_by_name(keyword: str, bound: Any) -> None:
    assert f"{keyword} has the number {bound}," in refused({"type": "integer", keyword: bound})


def test_boolean_exclusive_bounds_of_draft_4_make_the_bound_exclusive() -> None:
    schema = {"type": "integer", "minimum": TWO_53}
    assert accepted(schema, [str(TWO_53)])
    assert "minimum" in refused({**schema, "exclusiveMinimum": True})
    small = {"type": "integer", "minimum": 3, "exclusiveMinimum": True}
    assert accepted(small, ["3", "4"]) == ["4"]


def test_numbers_of_annotations_and_of_names_are_not_checked() -> None:
    number = 1234567890123456789
    schema = {
        "type": "object",
        "default": {"const": number},
        "examples": [{"minimum": number}],
        "x-made-by": {"enum": [number]},
        "properties": {"minimum": {"type": "boolean"}, "enum": {"type": "boolean"}},
    }
    assert accepted(schema, ['{"minimum":true}'])
