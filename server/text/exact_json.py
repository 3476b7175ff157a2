"""JSON whose numbers keep all their digits.

orjson reads an integer of more than 64 bits, and every decimal, as the nearest double.
"""

from __future__ import annotations

import json
import os
import re
from decimal import Decimal, InvalidOperation
from typing import Any

import orjson

# A number that a double may not hold contains one of these, once digits and points are zeros.
LONG = (b"0" * 16, b"0e000", b"0e-000")
AS_ZEROS = bytes.maketrans(b"123456789.E+", b"0000000000e-")
SHORT = 16  # characters of a decimal without an exponent that a double certainly holds
NUMBER = re.compile(r"-?[0-9.]+([eE][+-]?[0-9]+)?")
MAX_SHOWN = 40  # characters of a number in an error message


class LongDecimal(Decimal):
    """A number that no double holds. A template prints it as JSON, also inside a list."""

    __repr__ = Decimal.__str__


def loads(raw: bytes | str) -> Any:
    """Parse JSON. Integers have any size, and a decimal that no double holds is a LongDecimal.

    Raises json.JSONDecodeError, which names a number beyond the range of doubles.
    """
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        if "infinity" in error.msg and (found := NUMBER.match(error.doc, error.pos)):
            message = f"the number {shown(found[0])} is too large"
            raise json.JSONDecodeError(message, error.doc, error.pos) from None
        raise
    data = raw.encode() if isinstance(raw, str) else raw
    zeros = data.translate(AS_ZEROS)
    if not any(long in zeros for long in LONG):
        return value
    try:
        return parsed(data)
    except RecursionError:
        raise json.JSONDecodeError("too many brackets", "", 0) from None


def parsed(data: bytes | str) -> Any:
    """Parse JSON that this server wrote, as `loads` does. Lone surrogates are allowed."""
    return json.loads(data, parse_float=number)


def number(text: str) -> float | LongDecimal:
    """Return the number of a decimal in JSON. Raises json.JSONDecodeError for a huge exponent."""
    value = float(text)
    if len(text) <= SHORT and "e" not in text.lower():
        return value
    try:
        exact = LongDecimal(text)
    except InvalidOperation:
        message = f"the number {shown(text)} is too small"
        raise json.JSONDecodeError(message, "", 0) from None
    return value if exact == Decimal(repr(value)) else exact


def shown(value: Any) -> str:
    """Return a number for an error message. The middle of a long one is left out."""
    text = str(value)
    half = MAX_SHOWN // 2
    return text if len(text) <= MAX_SHOWN else f"{text[:half]}…{text[-half:]}"


def dumps(value: Any) -> bytes:
    """Return `value` as JSON without white space."""
    try:
        return orjson.dumps(value, default=_fragment)
    except orjson.JSONEncodeError:  # it has an integer of more than 64 bits
        return text(value, ensure_ascii=False, separators=(",", ":")).encode()


def text(value: Any, **options: Any) -> str:
    """Return `value` as JSON text. The options are those of json.dumps."""
    mark = os.urandom(8).hex()
    numbers: list[str] = []

    def marked(found: Any) -> str:
        if not isinstance(found, Decimal):
            raise TypeError(f"{type(found).__name__} is no JSON")
        numbers.append(str(found))
        return mark

    first, *rest = json.dumps(value, default=marked, **options).split(f'"{mark}"')
    pairs = zip(numbers, rest, strict=True)
    return "".join([first, *(part for pair in pairs for part in pair)])


def _fragment(value: Any) -> orjson.Fragment:
    if not isinstance(value, Decimal):
        raise TypeError(f"{type(value).__name__} is no JSON")
    return orjson.Fragment(str(value))
