"""The input of a custom tool: one text, which the model writes as the argument of a call."""

from __future__ import annotations

import json
import re

from server.text.parsers.values import is_encodable
from server.text.tools import INPUT

OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
PLAIN = re.compile(r'[^"\\]+')
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
PART_OF_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")
CHARACTERS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
HIGH, LOW, LAST = 0xD800, 0xDC00, 0xDFFF  # surrogates
NO_CHARACTER = "\N{REPLACEMENT CHARACTER}"  # for half of a surrogate pair


class InputReader:
    """Reads the input from the JSON text of the arguments, which arrives in pieces.

    The text streams if `input` is the first member. Models also write another name, or the text
    itself: that is known at the end only.
    """

    def __init__(self) -> None:
        self._held = ""  # not read yet
        self._is_streaming = False
        self._is_closed = False
        self._high = 0  # the first half of a surrogate pair

    def push(self, text: str) -> str:
        """Read the next piece. Return the next part of the input."""
        if self._is_closed:
            return ""
        self._held += text
        if not self._is_streaming:
            opening = OPENING.match(self._held)
            if opening is None:
                return ""
            self._is_streaming = True
            self._held = self._held[opening.end() :]
        return self._read()

    def end(self) -> str:
        """End the call. Return the rest of the input."""
        if not self._is_streaming:
            return _input_of(self._held)
        return "" if self._is_closed else self._lone() + self._held

    def _read(self) -> str:
        """Decode what is whole of the JSON string."""
        parts = []
        text, at = self._held, 0
        while at < len(text):
            plain = PLAIN.match(text, at)
            if plain:
                parts += [self._lone(), plain.group()]
                at = plain.end()
                continue
            if text[at] == '"':
                parts.append(self._lone())
                self._is_closed = True
                at = len(text)
                break
            if PART_OF_ESCAPE.fullmatch(text, at):
                break
            escape = ESCAPE.match(text, at)
            assert escape is not None
            at = escape.end()
            if escape[1] is None:
                char = escape[2]
                known = char in '"\\/' or char in CHARACTERS
                parts += [self._lone(), CHARACTERS.get(char, char) if known else f"\\{char}"]
            else:
                parts.append(self._code(int(escape[1], 16)))
        self._held = text[at:]
        return "".join(parts)

    def _code(self, code: int) -> str:
        """Return the character of an escape; "" for the first half of one."""
        if self._high and LOW <= code <= LAST:
            pair = 0x10000 + ((self._high - HIGH) << 10) + (code - LOW)
            self._high = 0
            return chr(pair)
        before = self._lone()
        if HIGH <= code < LOW:
            self._high = code
            return before
        return before + (NO_CHARACTER if LOW <= code <= LAST else chr(code))

    def _lone(self) -> str:
        """Return what stands for the first half of a pair that has no second one."""
        lone = NO_CHARACTER if self._high else ""
        self._high = 0
        return lone


def _input_of(text: str) -> str:
    """Return the input that arguments of another form have; the whole text if they have none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if isinstance(value, dict):
        texts = [member for member in value.values() if isinstance(member, str)]
        value = value.get(INPUT, texts[0] if len(texts) == 1 else None)
    return value if isinstance(value, str) and is_encodable(value) else text
