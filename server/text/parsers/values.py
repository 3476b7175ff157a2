"""Values that a model writes without JSON's quotes: the schema decides what they are.

Templates write texts as they are, and other values as JSON or as Python does (`None`, `True`).
"""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any, NamedTuple

from server.text import exact_json
from server.text.parsers.allowed import ANY, Allowed, allows
from server.text.parsers.json_scanner import JsonScanner

PYTHON_NAMES = {"true": "True", "false": "False", "null": "None"}
# A string that does not end is matched, too: otherwise each quote would be tried as a start.
STRING_OR_NAME = re.compile(
    r"""("(?:\\.|[^"\\])*(?:"|\\?\Z)|'(?:\\.|[^'\\])*(?:'|\\?\Z))|\b(true|false|null)\b""", re.S
)
MAX_PYTHON = 65_536  # characters; reading a Python literal takes a hundred times its memory
WHOLE = re.compile(r"(-?)\+?([0-9]+)(?:\.0*)?")  # with signs and zeros that JSON lacks
MAX_DIGITS = 4096  # Python refuses to read a few more
WORDS: dict[str, bool | None] = {
    "true": True,
    "1": True,
    "false": False,
    "0": False,
    "null": None,
    "none": None,
}


class Reading(NamedTuple):
    """A value that a text may stand for, and how it is passed on."""

    value: Any
    json: str


def json_of(text: str, allowed: Allowed) -> str:
    """Return the JSON text of a value that a model wrote without quotes.

    JSON of an allowed type comes first, then a text, if one is allowed. Numbers keep their digits.
    A text that can be no allowed value is passed on as what it looks like.
    """
    bare = text.strip()
    for reading in _readings(text, bare, allowed):
        if allows(allowed, reading.value):
            return reading.json
    return literal_json(bare)


def _readings(text: str, bare: str, allowed: Allowed) -> Iterator[Reading]:
    """Yield what a text may mean, the best first. `bare` has no white space around it."""
    found = _from_json(bare)
    is_text = found is None or isinstance(found.value, str)
    if found and (not is_text or allowed == ANY):
        yield found
    if "string" not in allowed:
        yield from _converted(bare)
        return
    python = _from_python(bare)
    if python and (python.value is None or isinstance(python.value, bool | list | dict)):
        yield python
    yield Reading(text, dumps(text))
    yield Reading(bare, dumps(bare))
    if found:
        yield found


def _converted(bare: str) -> Iterator[Reading]:
    """Yield the values of texts that are not JSON, for a schema that allows no text."""
    whole = WHOLE.fullmatch(bare)
    if whole and len(bare) <= MAX_DIGITS:
        sign, digits = whole[1], whole[2].lstrip("0") or "0"
        yield Reading(int(sign + digits), sign + digits)
    word = bare.lower()
    if word in WORDS:
        yield Reading(WORDS[word], dumps(WORDS[word]))
    python = _from_python(bare)
    if python:
        yield python


def literal_json(text: str) -> str:
    """Return the JSON text of a literal, which is JSON's or Python's, or of the text itself."""
    reading = _from_json(text) or _from_python(text)
    return reading.json if reading else dumps(text)


def _from_json(text: str) -> Reading | None:
    try:
        written = json_text(text)
        return Reading(read_json(written), written)
    except ValueError:
        return None


def _from_python(text: str) -> Reading | None:
    try:
        written = dumps(read_python(text))
        return Reading(json.loads(written), written)  # a tuple is an array now
    except (ValueError, RecursionError):
        return None


def json_text(text: str) -> str:
    """Return JSON as it is written, with escapes for control characters. Raises ValueError."""
    scanner = JsonScanner()
    end = scanner.push(text + " ", 0)  # a number ends at the space
    if not scanner.is_done or text[end:].strip():
        raise ValueError("not JSON")
    return scanner.take()


def read_json(text: str) -> Any:
    """Return a JSON value. Raises ValueError, also for what is not finite or nested too deeply."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError("too many brackets") from error


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float | Decimal:
    if math.isinf(float(text)):
        raise ValueError("number too large")
    return exact_json.number(text)


def read_python(text: str) -> Any:
    """Return the value of a Python literal, in which JSON's names may stand. Raises ValueError."""
    if len(text) > MAX_PYTHON:
        raise ValueError(f"longer than {MAX_PYTHON} characters")
    named = STRING_OR_NAME.sub(lambda m: m.group(1) or PYTHON_NAMES[m.group(2)], text)
    try:
        value = ast.literal_eval(named)
        json.dumps(value, allow_nan=False)
        if isinstance(value, tuple) and not text.startswith("("):
            raise ValueError("1,000 is a number with a comma")
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"not a literal: {text[:64]!r}") from error
    return value


def dumps(value: Any) -> str:
    """Return JSON text that can be encoded: a lone surrogate stays an escape."""
    text = exact_json.text(value, ensure_ascii=False)
    return text if is_encodable(text) else exact_json.text(value)


def is_encodable(text: str) -> bool:
    """Return whether a text is valid Unicode, without lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
