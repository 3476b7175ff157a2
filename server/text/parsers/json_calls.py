"""Read calls that are JSON objects with a name and arguments, or an array of them."""

from __future__ import annotations

import json
from typing import Literal

from server.text.marks import Marks
from server.text.parsers.calls import Calls
from server.text.parsers.formats import JsonCall
from server.text.parsers.json_scanner import SPACE, JsonScanner
from server.text.parsers.values import is_encodable

Place = Literal["start", "object", "first key", "key", "colon", "value", "after", "next"]
NAMES = ("name", "tool_name", "function")
ARGUMENTS = ("arguments", "parameters")  # models of one format mix them up


class JsonCalls:
    """Reads the calls from an opening brace or bracket to its end.

    `is_known_only` breaks at a function that is not among the tools, and at an object that has its
    name but no arguments: it may be an ordinary answer.
    """

    def __init__(self, body: JsonCall, calls: Calls, marks: Marks, *, is_known_only: bool) -> None:
        self.is_done = False
        self.is_broken = False
        self._body = body
        self._calls = calls
        self._marks = marks
        self._is_known_only = is_known_only
        self._is_list = False
        self._place: Place = "start"
        self._value = JsonScanner(marks)
        self._key = ""
        self._name = ""
        self._id: str | None = None
        self._early_arguments = ""  # before the name is known
        self._has_arguments = False
        self._has_other_keys = False
        self._parts: list[str] = []  # of the value being read, unless it streams
        self._first = ""  # its first character

    def step(self, text: str, at: int) -> int:
        """Read one piece at position `at`. Return the position after it."""
        if self._place in ("first key", "key", "value"):
            return self._read_value(text, at)
        self._structural(text[at])
        return at + 1

    def _structural(self, char: str) -> None:
        if char in SPACE:
            return
        match self._place, char:
            case "start", "[":
                self._is_list = True
                self._place = "object"
            case (("start" | "object"), "{"):
                self._begin_object()
            case "colon", ":":
                self._begin_value("value")
            case "after", ",":
                self._begin_value("key")
            case "after", "}":
                self._end_object()
            case "next", ",":
                self._place = "object"
            case ("next", "]"):
                self.is_done = True
            case _:
                self.is_broken = True

    def _begin_object(self) -> None:
        self._name = ""
        self._id = None
        self._early_arguments = ""
        self._has_arguments = False
        self._has_other_keys = False
        self._begin_value("first key")

    def _begin_value(self, place: Place) -> None:
        self._place = place
        self._value = JsonScanner(self._marks)
        self._parts = []
        self._first = ""

    def _read_value(self, text: str, at: int) -> int:
        if self._place == "first key" and text[at] == "}":
            self.is_broken = True  # an empty object is no call
            return at
        at = self._value.push(text, at)
        piece = self._value.take()
        self._first = self._first or piece[:1]
        if self._begins_arguments:
            self._open()
        if self._streams:
            self._calls.arguments(piece)
        else:
            self._parts.append(piece)
        self.is_broken = self._value.is_broken
        if self._value.is_done:
            self._end_value()
        return at

    @property
    def _streams(self) -> bool:
        """Whether the value being read is the arguments of the open call."""
        is_new = self._first == "{" and not self._has_arguments
        return is_new and self._place == "value" and self._is_arguments and self._calls.is_open

    @property
    def _begins_arguments(self) -> bool:
        """Whether arguments begin, and the call has only been named."""
        is_object = self._place == "value" and self._is_arguments and self._first == "{"
        return is_object and self._is_named

    @property
    def _is_named(self) -> bool:
        return bool(self._name) and not self._calls.is_open

    @property
    def _is_arguments(self) -> bool:
        return not self._body.name or self._key in (*ARGUMENTS, self._body.arguments)

    def _end_value(self) -> None:
        if self._place != "value":
            self._end_key()
            return
        has_streamed = self._streams
        self._place = "after"
        if self._is_arguments:
            if not has_streamed and not self._has_arguments:
                self._take_arguments()
            self._has_arguments = True
            return
        is_name = self._key in (*NAMES, self._body.name)
        if is_name and not self._name:
            self._begin_call(self._string())
        elif self._key in ("id", self._body.id):
            value = self._string()
            self._id = value if self._key == "id" else None
        elif self._key != "type":
            self._has_other_keys = True

    def _end_key(self) -> None:
        key = self._string()
        if key is None:
            self.is_broken = True
            return
        self._key = key
        self._place = "colon"
        if not self._body.name:
            self._begin_call(key)

    def _string(self) -> str | None:
        """Return the whole value, if it is a text that can be encoded."""
        value = json.loads("".join(self._parts)) if self._first == '"' else None
        return value if value is not None and is_encodable(value) else None

    def _take_arguments(self) -> None:
        """Take the whole arguments, which have not streamed."""
        self._early_arguments = "".join(self._parts)
        if self._is_named:
            self._open_with_early_arguments()
        elif self._calls.is_open:
            self._write_early_arguments()

    def _open_with_early_arguments(self) -> None:
        text = self._early_arguments
        inside = json.loads(text).lstrip() if text.startswith('"') else text
        if inside.startswith("{") or inside == "null":
            self._open()
        else:
            self.is_broken = True

    def _begin_call(self, name: str | None) -> None:
        is_known = name and (not self._is_known_only or self._calls.knows(name))
        if not name or not is_known or self._calls.is_open:
            self.is_broken = True
            return
        self._name = name
        if not self._is_known_only or self._calls.is_held(name):
            self._open()
        elif self._early_arguments:
            self._open_with_early_arguments()

    def _open(self) -> None:
        self._calls.begin(self._name, self._id)
        if self._early_arguments:
            self._write_early_arguments()

    def _write_early_arguments(self) -> None:
        """Write arguments that were read before the name, or that are JSON inside a text."""
        text, self._early_arguments = self._early_arguments, ""
        if text.startswith('"'):
            value = json.loads(text)
            text = value if is_encodable(value) else text
        self._calls.arguments("" if text == "null" else text)

    def _end_object(self) -> None:
        if self._is_named and not self._has_other_keys:
            self._open()
        if not self._calls.is_open:
            self.is_broken = True
            return
        self._calls.end()
        if self._is_list:
            self._place = "next"
        else:
            self.is_done = True
