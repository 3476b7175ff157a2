"""The scanner of a state in which the parser does not look for marks."""

from __future__ import annotations

from server.text.parsers.calls import Calls
from server.text.parsers.formats import GemmaCall, JsonCall
from server.text.parsers.json_calls import JsonCalls
from server.text.parsers.json_scanner import JsonScanner
from server.text.parsers.literal_calls import GemmaCalls, PythonCalls
from server.text.parsers.syntax import State, Syntax, body_of

Scanner = JsonScanner | JsonCalls | PythonCalls | GemmaCalls


def scanner_of(syntax: Syntax, state: State, calls: Calls) -> Scanner:
    """Return a new scanner of arguments or of calls; the latter adds to `calls`."""
    if state is State.ARGUMENTS:
        return JsonScanner(syntax.marks)
    is_bare = syntax.format is not None and syntax.format.is_bare
    match body_of(syntax.format):
        case JsonCall() as body:
            return JsonCalls(body, calls, syntax.marks, is_known_only=is_bare)
        case GemmaCall(quote=quote):
            return GemmaCalls(calls, syntax.marks, quote)
    return PythonCalls(calls, syntax.marks, is_known_only=is_bare)
