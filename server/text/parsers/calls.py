"""The tool calls of one answer while they grow: what the parser finds becomes events."""

from __future__ import annotations

import ast
import json
import math
import re
import secrets
import string
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, Literal

from server.text import exact_json
from server.text.parsers.deltas import CallOutcome, ToolCallDelta
from server.text.parsers.formats import IdStyle
from server.text.parsers.tools import Tool

ValueKind = Literal["text", "json", "either"]
ALPHANUMERIC = string.ascii_letters + string.digits
PYTHON_NAMES = {"true": "True", "false": "False", "null": "None"}
# A string that does not end is matched, too: otherwise each quote would be tried as a start.
STRING_OR_NAME = re.compile(
    r"""("(?:\\.|[^"\\])*(?:"|\\?\Z)|'(?:\\.|[^'\\])*(?:'|\\?\Z))|\b(true|false|null)\b""", re.S
)
MAX_PYTHON = 65_536  # characters; reading a Python literal takes a hundred times its memory


class Calls:
    """Collects the events of all calls. At most one call is open."""

    def __init__(
        self, tools: Mapping[str, Tool], id_style: IdStyle, emit: Callable[[Any], None]
    ) -> None:
        self.outcomes: list[CallOutcome] = []  # of the calls that have ended
        self.is_open = False
        self.count = 0
        self.num_changes = 0  # beginnings and ends
        self._tools = tools
        self._id_style = id_style
        self._emit = emit
        self._name = ""
        self._arguments: list[str] = []
        self._num_pairs = -1  # of arguments written by `key`; -1: not written that way
        self._awaits_value = False

    @property
    def has_any(self) -> bool:
        return self.count > 0

    def knows(self, name: str) -> bool:
        return name in self._tools

    def begin(self, name: str, call_id: str | None = None) -> None:
        self._name = name
        self._arguments = []
        self._num_pairs = -1
        self._awaits_value = False
        self.is_open = True
        self.count += 1
        self.num_changes += 1
        identity = call_id or self._new_id(name)
        self._emit(ToolCallDelta(self.count - 1, identity, name, ""))

    def arguments(self, text: str) -> None:
        """Append to the JSON text of the arguments."""
        if text:
            self._awaits_value = False
            self._arguments.append(text)
            self._emit(ToolCallDelta(self.count - 1, None, None, text))

    # Arguments that come as keys and values

    def key(self, key: str) -> None:
        """Begin the next argument."""
        self._num_pairs = max(self._num_pairs, 0)
        opening = ", " if self._num_pairs else "{"
        self._num_pairs += 1
        self.arguments(f"{opening}{_json(key)}: ")
        self._awaits_value = True

    def kind_of(self, key: str) -> ValueKind:
        """Return what a value without quotes is, by the tool's schema."""
        tool = self._tools.get(self._name)
        if tool is None:
            return "either"
        properties = tool.parameters.get("properties")
        schema = properties.get(key) if isinstance(properties, dict) else None
        if not isinstance(schema, dict):
            return "either"
        return kind_of_schema(schema)

    def value(self, text: str, kind: ValueKind) -> None:
        """Write the whole value of an argument, which the model wrote without JSON's quotes."""
        self.literal(read_value(text, kind), text)

    def literal(self, value: Any, text: str) -> None:
        """Write a value, which was read from `text`."""
        try:
            written = _json(value)
        except RecursionError:
            written = _json(text)
        self.arguments(written)

    def end(self) -> None:
        """End the open call. An argument without a value leaves its JSON text unfinished."""
        if not self._arguments:
            self.arguments("{}")
        elif self._num_pairs > 0 and not self._awaits_value:
            self.arguments("}")
        self.is_open = False
        self.num_changes += 1
        self.outcomes.append(self._outcome())

    def _outcome(self) -> CallOutcome:
        tool = self._tools.get(self._name)
        if tool is None:
            return "unknown_tool"
        try:
            given = json.loads("".join(self._arguments), parse_int=str)  # of any length
        except (ValueError, RecursionError):
            return "invalid_arguments"
        names = required_names(tool.parameters)
        if not isinstance(given, dict) or not all(name in given for name in names):
            return "invalid_arguments"
        return "valid"

    def _new_id(self, name: str) -> str:
        """Return an id that the model's own template can show."""
        match self._id_style:
            case "short":
                return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
            case "indexed":
                return f"functions.{name}:{self.count - 1}"
        return f"call_{secrets.token_hex(12)}"


def _json(value: Any) -> str:
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


def required_names(schema: Mapping[str, Any]) -> list[str]:
    """Return the names of the required arguments."""
    names = schema.get("required")
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


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


def kind_of_schema(schema: Mapping[str, Any]) -> ValueKind:
    """Return whether values of a schema are texts, or JSON, or one of both."""
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return "text" if kinds == "string" else "json"
    choices = schema.get("enum")
    if kinds is None and isinstance(choices, list) and choices:
        return "text" if all(isinstance(choice, str) for choice in choices) else "either"
    return "either"


def read_value(text: str, kind: ValueKind) -> Any:
    """Return the value that a model wrote without quotes: JSON, a Python literal, or a text."""
    if kind == "text":
        return text
    try:
        return read_json(text)
    except ValueError:
        pass
    try:
        return read_python(text.strip())
    except ValueError:
        return text


def read_python(text: str) -> Any:
    """Return the value of a Python literal, in which JSON's names may stand. Raises ValueError."""
    if len(text) > MAX_PYTHON:
        raise ValueError(f"longer than {MAX_PYTHON} characters")
    named = STRING_OR_NAME.sub(lambda m: m.group(1) or PYTHON_NAMES[m.group(2)], text)
    try:
        value = ast.literal_eval(named)
        json.dumps(value, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        raise ValueError(f"not a literal: {text[:64]!r}") from error
    return value
