"""Infer the format of tool calls from one answer that a chat template has rendered.

The fixed texts of the format are what stands between the names, keys and values of known calls, as
in llama.cpp's docs/autoparser.md. The caller checks the result by parsing the answer with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from server.text.parsers.formats import Body, CallFormat, JsonCall, NamedCall, TaggedCall

MAX_PLACES = 64
Called = tuple[str, Any]  # a function's name and its arguments


class _Span(NamedTuple):
    """Where a call stands in the answer, and how it is written."""

    start: int
    end: int
    body: Body


def infer_format(answer: str, called: Sequence[Called]) -> CallFormat | None:
    """Return the format of an answer with one or two calls, or None if it cannot be inferred."""
    for find in (_json_list, _json_object, _named, _tagged):
        span = find(answer, called, 0)
        if span is None:
            continue
        if isinstance(span.body, JsonCall) and span.body.is_list:
            before, after = answer[: span.start], answer[span.end :]
            section = before[before.rfind("\n") + 1 :] or before
            return CallFormat(
                "template", span.body, section_open=section, section_close=_word(after)
            )
        if len(called) == 1:
            return CallFormat("template", span.body, open=answer[: span.start])
        second = find(answer, called[1:], span.end)
        if second is None:
            return None
        return _around(answer, span, second)
    return None


def _around(answer: str, first: _Span, second: _Span) -> CallFormat:
    """Return the format from the texts before, between and after two calls."""
    before = answer[: first.start]
    between = answer[first.end : second.start]
    after = answer[second.end :]
    opening = _common_suffix(before, between)
    closing = _common_prefix(between.removesuffix(opening), after)
    separator = between[len(closing) : len(between) - len(opening)]
    outside = before.removesuffix(opening)
    return CallFormat(
        "template",
        first.body,
        open=opening,
        close=closing,
        separator=separator,
        section_open="" if opening.strip() else outside,
    )


def _common_prefix(first: str, second: str) -> str:
    size = 0
    while size < min(len(first), len(second)) and first[size] == second[size]:
        size += 1
    return first[:size]


def _common_suffix(first: str, second: str) -> str:
    return _common_prefix(first[::-1], second[::-1])[::-1]


def _word(text: str) -> str:
    """Return the mark that `text` begins with."""
    for closing in (">", "]"):
        end = text.find(closing)
        if 0 <= end < 64:
            return text[: end + 1]
    return ""


def _places(text: str, bracket: str, start: int) -> Iterator[int]:
    """Yield the first places of a bracket; a hostile template writes many."""
    at = text.find(bracket, start)
    for _ in range(MAX_PLACES):
        if at < 0:
            return
        yield at
        at = text.find(bracket, at + 1)


def _json_at(text: str, at: int) -> tuple[Any, int]:
    """Return the JSON value at a position and where it ends; (None, at) if there is none."""
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None, at


def _json_body(value: Any, called: Called, *, is_list: bool) -> JsonCall | None:
    """Return the keys of a call that is a JSON object."""
    if not isinstance(value, dict):
        return None
    name, arguments = called
    if value == {name: arguments}:
        return JsonCall(name="", is_list=is_list)
    names = [key for key, given in value.items() if given == name]
    holders = [key for key, given in value.items() if given == arguments]
    if not names or not holders:
        return None
    return JsonCall(names[0], holders[0], is_list=is_list)


def _json_list(answer: str, called: Sequence[Called], start: int) -> _Span | None:
    for at in _places(answer, "[", start):
        value, end = _json_at(answer, at)
        if isinstance(value, list) and value:
            body = _json_body(value[0], called[0], is_list=True)
            if body is not None:
                return _Span(at, end, body)
    return None


def _json_object(answer: str, called: Sequence[Called], start: int) -> _Span | None:
    for at in _places(answer, "{", start):
        value, end = _json_at(answer, at)
        body = _json_body(value, called[0], is_list=False)
        if body is not None:
            return _Span(at, end, body)
    return None


def _named(answer: str, called: Sequence[Called], start: int) -> _Span | None:
    name, arguments = called[0]
    at = answer.find(name, start)
    if at < 0:
        return None
    after_name = at + len(name)
    opening = answer.find("{", after_name)
    if opening < 0:
        return None
    value, end = _json_at(answer, opening)
    if value != arguments:
        return None
    return _Span(at, end, NamedCall(answer[after_name:opening]))


def _tagged(answer: str, called: Sequence[Called], start: int) -> _Span | None:
    """Return a call whose keys and values stand between tags. It has two arguments or more."""
    name, arguments = called[0]
    places = []
    at = answer.find(name, start)
    end = at + len(name)
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value)
        key_at = answer.find(key, end)
        value_at = answer.find(text, key_at + len(key))
        if at < 0 or key_at < 0 or value_at < 0:
            return None
        places.append((key_at, key_at + len(key), value_at, value_at + len(text)))
        end = value_at + len(text)
    (key_1, key_1_end, value_1, value_1_end), (key_2, *_), *_ = places
    before_key = answer[at + len(name) : key_1]
    between = answer[value_1_end:key_2]
    key_open = _common_suffix(before_key, between)
    value_close = between.removesuffix(key_open)
    if not key_open.strip() or not value_close.strip():
        return None
    body = TaggedCall(
        name_end=before_key.removesuffix(key_open),
        key_open=key_open,
        key_close=answer[key_1_end:value_1],
        value_close=value_close,
    )
    end += len(value_close) if answer.startswith(value_close, end) else 0
    return _Span(at, end, body)
