"""Read calls whose arguments are pairs of a name and a literal: Python's and Gemma's formats.

An argument is passed on when it is whole.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from server.text.marks import Marks
from server.text.parsers.calls import Calls
from server.text.parsers.values import dumps, literal_json, read_json

SPACE = " \t\n\r"
OPEN, CLOSE = "([{", ")]}"
PLAIN = re.compile(r"[^\"'()\[\]{},\\]+")  # outside strings; and inside them:
PLAIN_STRING = re.compile(r"[^\"'\\]+")
NAME = re.compile(r"[A-Za-z0-9_.:/-]+")  # of a function, or a key
MAX_NAME = 256

Place = Literal["start", "call", "name", "key", "value", "next"]


class PythonCalls:
    """Reads [f(a=1, b="x"), g()] from the bracket to its end."""

    def __init__(self, calls: Calls, marks: Marks, *, is_known_only: bool) -> None:
        self.is_done = False
        self.is_broken = False
        self._calls = calls
        self._marks = marks
        self._is_known_only = is_known_only
        self._place: Place = "start"
        self._name = ""  # of a call that has not begun
        self._text = ""  # of the name or key being read
        self._parts: list[str] = []  # of the value being read
        self._depth = 0  # of brackets in a value
        self._quote = ""
        self._is_escaped = False

    def step(self, text: str, at: int) -> int:
        """Read one piece at position `at`. Return the position after it."""
        match self._place:
            case "value":
                return self._in_value(text, at)
            case "name" | "key":
                self._in_name(text[at])
            case _:
                self._between(text[at])
        return at + 1

    def _between(self, char: str) -> None:
        if char in SPACE:
            return
        match self._place, char:
            case "start", "[":
                self._place = "call"
            case "next", ",":
                self._place = "call"
            case ("next", "]"):
                self.is_done = True
            case "call", _:
                self._text = char
                self._place = "name"
                self.is_broken = NAME.fullmatch(char) is None
            case _:
                self.is_broken = True

    def _in_name(self, char: str) -> None:
        end = "(" if self._place == "name" else "="
        if char == ")" and self._place == "key" and not self._text.strip():
            self._end_call()
        elif char == end:
            self._end_name()
        elif len(self._text) < MAX_NAME and _is_name(self._text + char):
            self._text += char
        else:
            self.is_broken = True

    def _end_name(self) -> None:
        name = self._text.strip()
        self._text = ""
        if not NAME.fullmatch(name):
            self.is_broken = True
        elif self._place == "key":
            self._begin_named()
            self._calls.key(name)
            self._place = "value"
            self._depth = 0
        elif self._is_known_only and not self._calls.knows(name):
            self.is_broken = True
        else:
            self._name = name
            self._place = "key"
            if not self._is_known_only or self._calls.is_held(name):
                self._begin_named()

    def _begin_named(self) -> None:
        """Begin the call, unless it has begun. Prose may be like the beginning of one."""
        if self._name:
            self._calls.begin(self._name)
            self._name = ""

    def _in_value(self, text: str, at: int) -> int:
        plain = (PLAIN_STRING if self._quote else PLAIN).match(text, at)
        if plain and not self._is_escaped:
            self._parts.append(self._with_tokens(plain.group()))
            return plain.end()
        char = text[at]
        if self._quote:
            self._in_string(char)
        elif self._depth == 0 and char in ",)":
            self._end_value()
            self._place = "key"
            if char == ")":
                self._end_call()
            return at + 1
        elif char in OPEN:
            self._depth += 1
        elif char in CLOSE:
            self._depth = max(self._depth - 1, 0)
        elif char in "\"'":
            self._quote = char
        self._parts.append(self._with_tokens(char))
        return at + 1

    def _with_tokens(self, text: str) -> str:
        if not self._quote or text in "\"'":
            return self._marks.text(text)
        return self._marks.quoted(text).replace("'", "\\'")

    def _in_string(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif char == "\\":
            self._is_escaped = True
        elif char == self._quote:
            self._quote = ""

    def _end_value(self) -> None:
        text = "".join(self._parts).strip()
        self._parts = []
        self._calls.arguments(literal_json(text))

    def _end_call(self) -> None:
        self._begin_named()
        self._calls.end()
        self._text = ""
        self._place = "next"


def _is_name(text: str) -> bool:
    return not text.strip() or NAME.fullmatch(text.strip()) is not None


class GemmaCalls:
    """Reads f{a:1,b:<|"|>x<|"|>} from the name to the closing brace.

    Texts have no escapes: they end at the next `quote`, which may be a token of `marks`.
    """

    def __init__(self, calls: Calls, marks: Marks, quote: str) -> None:
        self.is_done = False
        self.is_broken = False
        self._calls = calls
        self._marks = marks
        self._quote = marks.encode(quote)  # one character, or a text
        self._text = ""  # of the name or key being read
        self._parts: list[str] = []  # of the value being read
        self._tail = ""  # its last characters, perhaps a quote
        self._place: Place = "name"
        self._depth = 0
        self._is_quoted = False

    def step(self, text: str, at: int) -> int:
        """Read the character at position `at`. Return the position after it."""
        char = text[at]
        if self._place == "value":
            self._in_value(char)
        elif char == "}" and self._place == "key" and not self._text.strip():
            self._end_call()
        elif char == ("{" if self._place == "name" else ":"):
            self._end_name()
        elif len(self._text) < MAX_NAME:
            self._text += char
        else:
            self.is_broken = True
        return at + 1

    def _end_name(self) -> None:
        name = self._marks.text(self._text.replace(self._quote, "")).strip(" ,\n")
        self._text = ""
        if not name:
            self.is_broken = True
        elif self._place == "key":
            self._calls.key(name)
            self._place = "value"
            self._depth = 0
        else:
            self._calls.begin(name)
            self._place = "key"

    def _in_value(self, char: str) -> None:
        if not self._is_quoted and self._depth == 0 and char in ",}":
            text = "".join(self._parts)
            self._calls.arguments(_gemma_json(text, self._quote))
            self._parts = []
            self._tail = ""
            self._place = "key"
            if char == "}":
                self._end_call()
            return
        self._parts.append(char if char == self._quote else self._marks.text(char))
        self._tail = (self._tail + char)[-len(self._quote) :]
        if self._tail == self._quote:
            self._is_quoted = not self._is_quoted
        elif not self._is_quoted:
            self._depth = max(self._depth + (char in OPEN) - (char in CLOSE), 0)

    def _end_call(self) -> None:
        self._calls.end()
        self.is_done = True


def _gemma_json(text: str, quote: str) -> str:
    try:
        return dumps(_GemmaValue(text, quote).read())
    except RecursionError:
        return dumps(text)


class _GemmaValue:
    """Reads one whole value: a quoted text, an object, an array, or a JSON scalar."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text.strip()
        self._quote = quote
        self._at = 0

    def read(self) -> Any:
        """Return the value, or the text itself if it cannot be read."""
        try:
            value = self._value()
        except (ValueError, IndexError, RecursionError):
            return self._text
        return value if self._at == len(self._text) else self._text

    def _value(self) -> Any:
        if self._text.startswith(self._quote, self._at):
            return self._quoted()
        if self._text[self._at] in "{[":
            return self._collection()
        end = self._at
        while end < len(self._text) and self._text[end] not in ",]}:":
            end += 1
        word = self._text[self._at : end].strip()
        self._at = end
        return read_json(word)

    def _quoted(self) -> str:
        start = self._at + len(self._quote)
        end = self._text.index(self._quote, start)
        self._at = end + len(self._quote)
        return self._text[start:end]

    def _collection(self) -> Any:
        is_object = self._text[self._at] == "{"
        closing = "}" if is_object else "]"
        items: list[Any] = []
        pairs: dict[str, Any] = {}
        self._at += 1
        while self._text[self._at] != closing:
            if is_object:
                key = self._key()
                pairs[key] = self._value()
            else:
                items.append(self._value())
            if self._text[self._at] == ",":
                self._at += 1
        self._at += 1
        return pairs if is_object else items

    def _key(self) -> str:
        if self._text.startswith(self._quote, self._at):
            key = self._quoted()
        else:
            end = self._text.index(":", self._at)
            key, self._at = self._text[self._at : end].strip(), end
        self._at = self._text.index(":", self._at) + 1
        return key
