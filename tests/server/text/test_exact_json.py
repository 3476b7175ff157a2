"""JSON whose numbers keep all their digits, from a request to a template and an answer."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from server.text import exact_json
from server.text.template_sandbox import environment

KEPT = [
    "1234567890123456789",
    "18446744073709551616",
    "-9223372036854775809",
    "100000000000000000001",
    "0.1000000000000000055",
    "123456789012345678901234567890.5",
    "9007199254740993.0",
    "1E-400",
    "1.5",
    "0.30000000000000004",
    "5e-324",
    "-0.0",
]


@pytest.mark.parametrize("number", KEPT)
def test_number_keeps_its_digits_from_loads_to_dumps(number: str) -> None:
    written = f'{{"a":[{number},"{number}"],"b":{number}}}'
    value = exact_json.loads(written)
    assert exact_json.dumps(value).decode() == written
    assert exact_json.text(value, separators=(",", ":")) == written
    assert exact_json.parsed(exact_json.text(value)) == value


def test_ordinary_numbers_are_pythons_own() -> None:
    """Templates and validators expect int and float. 1.10 is the number 1.1."""
    value = exact_json.loads(b"[1, -0, 1.10, 1e3, 0.1, 1e22, 12345678.12345678]")
    assert value == [1, 0, 1.1, 1000.0, 0.1, 1e22, 12345678.12345678]
    assert [type(number) for number in value] == [int, int, *[float] * 5]


@pytest.mark.parametrize(
    ("number", "named"),
    [
        ("1e400", "1e400"),
        ("-1e400", "-1e400"),
        ("1" + "0" * 400, "10000000000000000000…00000000000000000000"),
        ("1e-99999999999999999999", "1e-99999999999999999999"),
    ],
)
def test_number_beyond_every_range_is_refused_by_name(number: str, named: str) -> None:
    with pytest.raises(json.JSONDecodeError, match=f"the number {named} is too"):
        exact_json.loads(f'{{"é": [1, {number}]}}')


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "[1,]", '"\\ud800"', "01"])
def test_what_is_no_json_is_refused_also_with_long_numbers(text: str) -> None:
    for around in ("%s", "[1234567890123456789, %s]"):
        with pytest.raises(json.JSONDecodeError):
            exact_json.loads(around % text)


def test_deep_json_with_long_numbers_is_refused_as_json_is() -> None:
    with pytest.raises(json.JSONDecodeError):
        exact_json.loads("[" * 1020 + "1234567890123456789" + "]" * 1020)


def test_text_takes_the_options_of_json_dumps() -> None:
    value = {"b": exact_json.loads("0.1000000000000000055"), "a": "é"}
    assert exact_json.text(value, sort_keys=True, indent=1, ensure_ascii=False) == (
        '{\n "a": "é",\n "b": 0.1000000000000000055\n}'
    )


@pytest.mark.parametrize("write", [exact_json.dumps, exact_json.text])
def test_what_json_lacks_is_no_number(write: Any) -> None:
    with pytest.raises(TypeError):
        write({"a": object(), "b": Decimal("0.1")})


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("{{ x }}", "0.1000000000000000055"),
        ("{{ [x, n] }}", "[0.1000000000000000055, 100000000000000000001]"),
        ("{{ {'a': x} | tojson }}", '{"a": 0.1000000000000000055}'),
        ("{{ n | tojson }}", "100000000000000000001"),
        ("{{ x is number }} {{ x is string }}", "True False"),
    ],
)
def test_template_prints_all_digits(source: str, expected: str) -> None:
    sandbox: ImmutableSandboxedEnvironment = environment()
    numbers = exact_json.loads('{"x": 0.1000000000000000055, "n": 100000000000000000001}')
    assert sandbox.from_string(source).render(numbers) == expected
