"""The tool calls of one answer while they grow: what the parser finds becomes events."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Mapping
from typing import Any

from server.text.deltas import CallOutcome, ToolCallDelta
from server.text.parsers.allowed import (
    ANY,
    Allowed,
    allowed_values,
    properties_of,
    required_names,
)
from server.text.parsers.custom_input import InputReader
from server.text.parsers.formats import IdStyle
from server.text.parsers.values import dumps
from server.text.tools import Tool

ALPHANUMERIC = string.ascii_letters + string.digits


class Calls:
    """Collects the events of all calls. At most one call is open."""

    def __init__(
        self, tools: Mapping[str, Tool], id_style: IdStyle, emit: Callable[[Any], None]
    ) -> None:
        self.outcomes: list[CallOutcome] = []  # of the calls that have ended
        self.malformed: list[CallOutcome] = []  # one for each text that looked like a call
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
        self._input: InputReader | None = None  # of an open call of a custom tool

    @property
    def has_any(self) -> bool:
        return self.count > 0

    def knows(self, name: str) -> bool:
        return name in self._tools

    def is_held(self, name: str) -> bool:
        """Return whether a grammar holds the input of a tool."""
        tool = self._tools.get(name)
        return tool is not None and tool.input_is_held

    @property
    def awaits_input(self) -> bool:
        """Whether the open call goes on with the input itself, which a grammar holds."""
        return self.is_open and self.is_held(self._name)

    def begin(self, name: str, call_id: str | None = None) -> None:
        self._name = name
        self._arguments = []
        self._num_pairs = -1
        self._awaits_value = False
        self.is_open = True
        self.count += 1
        self.num_changes += 1
        identity = call_id or self._new_id(name)
        tool = self._tools.get(name)
        is_custom = tool is not None and tool.input is not None
        self._input = InputReader() if is_custom else None
        self._emit(ToolCallDelta(self.count - 1, identity, name, "", is_custom))

    def arguments(self, text: str) -> None:
        """Append to the JSON text of the arguments."""
        if text:
            self._awaits_value = False
            self._arguments.append(text)
            if self._input is not None:
                self.input(self._input.push(text))
            else:
                self._emit(ToolCallDelta(self.count - 1, None, None, text))

    def input(self, text: str) -> None:
        """Append to the input of a custom tool."""
        if text:
            self._emit(ToolCallDelta(self.count - 1, None, None, text, is_custom=True))

    # Arguments that come as keys and values

    def key(self, key: str) -> None:
        """Begin the next argument."""
        self._num_pairs = max(self._num_pairs, 0)
        opening = ", " if self._num_pairs else "{"
        self._num_pairs += 1
        self.arguments(f"{opening}{dumps(key)}: ")
        self._awaits_value = True

    def allowed(self, key: str) -> Allowed:
        """Return what the tool's schema allows as the value of an argument."""
        tool = self._tools.get(self._name)
        if tool is None:
            return ANY
        schema = properties_of(tool.parameters).get(key)
        if schema is None:
            schema = tool.parameters.get("additionalProperties")
        return allowed_values(schema, tool.parameters)

    def end(self) -> None:
        """End the open call. An argument without a value leaves its JSON text unfinished."""
        if self.awaits_input:
            pass  # it has been written without arguments
        elif not self._arguments:
            self.arguments("{}")
        elif self._num_pairs > 0 and not self._awaits_value:
            self.arguments("}")
        outcome = self._outcome()
        if self._input is not None and not self.awaits_input:
            self.input(self._input.end())
        self.is_open = False
        self.num_changes += 1
        self.outcomes.append(outcome)

    def _outcome(self) -> CallOutcome:
        tool = self._tools.get(self._name)
        if tool is None:
            return "unknown_tool"
        if tool.input_is_held:
            return "valid"
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
