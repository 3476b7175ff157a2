"""Follow a JSON value through a text that arrives in pieces (RFC 8259)."""

from __future__ import annotations

import re
from typing import Literal

from server.text.marks import NO_MARKS, Marks

Mode = Literal["value", "item", "key", "first key", "colon", "after", "string", "escape", "scalar"]

PLAIN = re.compile(r'[^"\\\x00-\x1f]+')  # of a string
SPACE = " \t\n\r"
HEX = frozenset("0123456789abcdefABCDEF")
CONTROL = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
DIGITS = "0123456789"
WORDS = ("true", "false", "null")
EXPONENT = {"e": "e", "E": "e"}


def _scalar_steps() -> dict[str, dict[str, str]]:
    """Return the states of numbers and words: in a state, each character leads to the next."""
    fraction = {**dict.fromkeys(DIGITS, "fraction"), **EXPONENT}
    exponent = dict.fromkeys(DIGITS, "exponent")
    first = {"0": "zero", **dict.fromkeys(DIGITS[1:], "whole")}
    steps = {
        "": {"-": "minus", **first},
        "minus": first,
        "zero": {".": "point", **EXPONENT},
        "whole": {**dict.fromkeys(DIGITS, "whole"), ".": "point", **EXPONENT},
        "point": dict.fromkeys(DIGITS, "fraction"),
        "fraction": fraction,
        "e": {"+": "sign", "-": "sign", **exponent},
        "sign": exponent,
        "exponent": exponent,
    }
    for word in WORDS:
        for size, char in enumerate(word):
            steps.setdefault(word[:size], {})[char] = word[: size + 1]
    return steps


SCALAR_STEPS = _scalar_steps()
SCALAR_ENDS = frozenset({"zero", "whole", "fraction", "exponent", *WORDS})
PART_OF_SCALAR = re.compile(r"[-+.0-9A-Za-z]+")


class JsonScanner:
    """Reads one JSON value, and stops where it ends or where it breaks. Drops space before it.

    A control character in a string, such as a line break, is not JSON, but models write it. It is
    replaced by its escape, so that `text` is always a beginning of valid JSON. A token of `marks`
    in a string becomes its text.
    """

    def __init__(self, marks: Marks = NO_MARKS) -> None:
        self.is_done = False
        self.is_broken = False
        self._stack: list[str] = []  # open brackets
        self._marks = marks
        self._mode: Mode = "value"
        self._escape = ""  # after a backslash
        self._scalar = ""  # state
        self._is_key = False
        self._parts: list[str] = []

    def take(self) -> str:
        """Return the text read since the last call."""
        text = "".join(self._parts)
        self._parts.clear()
        return text

    def push(self, text: str, at: int) -> int:
        """Read from position `at`. Return the position after what was read."""
        while at < len(text) and not self.is_done and not self.is_broken:
            at = self.step(text, at)
        return at

    def step(self, text: str, at: int) -> int:
        """Read one piece at position `at`. Return the position after it."""
        match self._mode:
            case "string":
                return self._string(text, at)
            case "escape":
                return self._escaped(text, at)
            case "scalar":
                return self._more_scalar(text, at)
        char = text[at]
        if char not in SPACE and not self._structural(char):
            self.is_broken = True
            return at
        if self._reads_scalar:  # its first character is read with the others
            return at
        is_leading_space = char in SPACE and self._mode == "value" and not self._stack
        if not is_leading_space:
            self._parts.append(char)
        return at + 1

    @property
    def _reads_scalar(self) -> bool:
        return self._mode == "scalar"

    def _structural(self, char: str) -> bool:
        """Read a character outside strings and scalars. Return whether it may stand here."""
        match self._mode:
            case "value":
                return self._begin_value(char)
            case "item":
                return self._close("]") if char == "]" else self._begin_value(char)
            case "first key" if char == "}":
                return self._close("}")
            case "key" | "first key":
                self._is_key = True
                self._mode = "string"
                return char == '"'
            case "colon":
                self._mode = "value"
                return char == ":"
        if char == ",":
            self._mode = "key" if self._stack[-1] == "}" else "value"
            return True
        return self._close(char)

    def _begin_value(self, char: str) -> bool:
        if char == "{":
            self._stack.append("}")
            self._mode = "first key"
        elif char == "[":
            self._stack.append("]")
            self._mode = "item"
        elif char == '"':
            self._is_key = False
            self._mode = "string"
        else:
            self._scalar = ""
            self._mode = "scalar"
            return char in SCALAR_STEPS[""]
        return True

    def _close(self, char: str) -> bool:
        if not self._stack or self._stack[-1] != char:
            return False
        self._stack.pop()
        self._end_value()
        return True

    def _end_value(self) -> None:
        self._mode = "after"
        self.is_done = not self._stack

    def _string(self, text: str, at: int) -> int:
        plain = PLAIN.match(text, at)
        if plain:
            self._parts.append(self._marks.quoted(plain.group()))
            return plain.end()
        char = text[at]
        if char == '"':
            self._parts.append(char)
            if self._is_key:
                self._mode = "colon"
            else:
                self._end_value()
        elif char == "\\":
            self._escape = ""
            self._mode = "escape"
        else:
            self._parts.append(CONTROL.get(char, f"\\u{ord(char):04x}"))
        return at + 1

    def _escaped(self, text: str, at: int) -> int:
        """Read an escape. It is passed on whole, so that `text` never ends within one."""
        escape = self._escape + text[at]
        if escape[0] == "u":
            is_valid = escape == "u" or escape[-1] in HEX
            is_whole = len(escape) == 5
        else:
            is_valid = escape in '"\\/bfnrt'
            is_whole = True
        if not is_valid:
            self.is_broken = True
            return at
        self._escape = escape
        if is_whole:
            self._parts.append("\\" + escape)
            self._mode = "string"
        return at + 1

    def _more_scalar(self, text: str, at: int) -> int:
        found = PART_OF_SCALAR.match(text, at)
        if found is None:
            self._end_scalar()
            return at
        end = at
        for char in found.group():
            following = SCALAR_STEPS.get(self._scalar, {}).get(char)
            if following is None:
                self.is_broken = True
                break
            self._scalar = following
            end += 1
        self._parts.append(text[at:end])
        return end

    def _end_scalar(self) -> None:
        if self._scalar in SCALAR_ENDS:
            self._end_value()
        else:
            self.is_broken = True
