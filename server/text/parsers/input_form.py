"""The form of a call of a custom tool whose input a grammar holds.

The call begins as the model's own calls do, up to the name. Then comes a fixed text, and the input
as it is: without quotes or escapes, up to a token or the end of the answer. An escaped input could
not be held: llguidance splits a text into lexemes with one byte of lookahead, and an escape of JSON
is longer than that.
"""

from __future__ import annotations

from server.text.marks import Marks
from server.text.parsers.calls import Calls
from server.text.parsers.formats import (
    AnyCallFormat,
    CallFormat,
    GemmaCall,
    JsonCall,
    LinesCall,
    NamedCall,
    PythonCall,
    TaggedCall,
)
from server.text.tools import INPUT


def lead_of(format: AnyCallFormat | None) -> str:
    """Return the text between what the parser reads as the name and the input."""
    if not isinstance(format, CallFormat):
        return ""
    match format.body:
        case JsonCall(name="") | PythonCall():
            return ":\n" if isinstance(format.body, JsonCall) else f"{INPUT}=\n"
        case JsonCall(arguments=arguments):
            return f', "{arguments}":\n'
        case NamedCall(separator=separator):
            return _space_after(separator)
        case TaggedCall() as body:
            begin = _space_after(body.name_end) + body.key_open
            if not body.name_end:
                begin = _space_after(body.key_open)
            return f"{begin}{INPUT}{body.key_close}{body.value_open}"
        case LinesCall(name_end=name_end, key_end=key_end):
            return f"{_space_after(name_end)}{INPUT}{key_end}\n"
        case GemmaCall(quote=quote):
            return f"{INPUT}:{quote}"


def _space_after(mark: str) -> str:
    """Return the white space at the end of a mark, which the parser does not read with it."""
    return mark[len(mark.rstrip()) :] if mark.strip() else ""


def _closing_of(format: AnyCallFormat | None) -> str:
    """Return the texts that the model writes after the value of an argument."""
    if not isinstance(format, CallFormat):
        return ""
    closing = format.close + format.section_close
    match format.body:
        case TaggedCall(value_close=value_close):
            return value_close + closing
        case GemmaCall(quote=quote):
            return quote + closing
    return closing


def end_mark_of(format: AnyCallFormat | None, marks: Marks) -> str:
    """Return the mark of the first token after a value, which ends the input; "" if none does."""
    for char in marks.encode(_closing_of(format)):
        if char in marks.ids:
            return char
    return ""


def tail_of(format: AnyCallFormat | None, marks: Marks) -> str:
    """Return the tags that a model may write between the input and the token that ends it."""
    if not isinstance(format, CallFormat) or not isinstance(format.body, TaggedCall):
        return ""
    closing = marks.encode(_closing_of(format))
    end = end_mark_of(format, marks)
    tail = closing[: closing.index(end)] if end else closing
    return tail if tail.strip() else ""  # white space may be a part of the input


class HeldInput:
    """Reads the input of an open call, which arrives in pieces.

    A tail of the format's tags is no part of the input: models write it where the grammar allows
    any text. Its possible beginning is held back.
    """

    def __init__(self, calls: Calls, lead: str, tail: str) -> None:
        self._calls = calls
        self._lead = lead
        self._tail = tail
        self._held = ""
        self.has_begun = False

    def push(self, text: str) -> None:
        self._held += text
        if not self.has_begun:
            if len(self._held) < len(self._lead):
                return
            self.has_begun = True
            self._held = self._held.removeprefix(self._lead)
        size = self._size_of_tail()
        whole = len(self._held) - size
        self._calls.input(self._held[:whole])
        self._held = self._held[whole:]

    def _size_of_tail(self) -> int:
        """Return how many characters at the end may be the beginning of the tail."""
        most = min(len(self._tail), len(self._held))
        for size in range(most, 0, -1):
            if self._tail.startswith(self._held[-size:]):
                return size
        return 0

    def end(self) -> None:
        if self.has_begun and self._held != self._tail:
            self._calls.input(self._held)
