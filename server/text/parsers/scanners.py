"""The readers of arguments: of a state without marks, and of a value between marks."""

from __future__ import annotations

from server.text.parsers.allowed import ANY, ANY_TEXT
from server.text.parsers.calls import Calls
from server.text.parsers.formats import CallFormat, GemmaCall, JsonCall, LinesCall
from server.text.parsers.input_form import HeldInput, lead_of, tail_of
from server.text.parsers.json_calls import JsonCalls
from server.text.parsers.json_scanner import JsonScanner
from server.text.parsers.literal_calls import GemmaCalls, PythonCalls
from server.text.parsers.syntax import State, Syntax, body_of
from server.text.parsers.tagged_value import TaggedValue

Scanner = JsonScanner | JsonCalls | PythonCalls | GemmaCalls


def scanner_of(syntax: Syntax, state: State, calls: Calls) -> Scanner:
    """Return a new scanner of arguments or of calls; the latter adds to `calls`."""
    if state is State.ARGUMENTS:
        return JsonScanner(syntax.marks)
    match body_of(syntax.format):
        case JsonCall() as body:
            return JsonCalls(body, calls, syntax.marks, is_known_only=syntax.is_bare)
        case GemmaCall(quote=quote):
            return GemmaCalls(calls, syntax.marks, quote)
    return PythonCalls(calls, syntax.marks, is_known_only=syntax.is_bare)


def value_of(syntax: Syntax, state: State, calls: Calls, key: str) -> TaggedValue:
    """Return a new reader of the value of an argument, which adds to `calls`."""
    allowed = calls.allowed(key)
    has_json_values = bool(syntax.transitions[State.JSON_VALUE])
    if has_json_values and "string" in allowed:  # the format itself tells texts from JSON
        allowed = ANY if state is State.JSON_VALUE else ANY_TEXT
    format = syntax.format
    has_lines = isinstance(format, CallFormat) and isinstance(format.body, LinesCall)
    return TaggedValue(calls, key, allowed, is_stripped=has_lines)


def input_of(syntax: Syntax, calls: Calls) -> HeldInput:
    """Return a new reader of the input of a custom tool, which adds to `calls`."""
    tail = syntax.marks.text(tail_of(syntax.format, syntax.marks))
    return HeldInput(calls, lead_of(syntax.format), tail)
