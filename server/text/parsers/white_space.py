"""Complete the marks of a format with the white space that a chat template writes around them.

A grammar holds the model to it. For the parser it does not matter.
"""

from __future__ import annotations

import re
from dataclasses import replace

from server.text.parsers.formats import Body, CallFormat, NamedCall, TaggedCall


def with_white_space(format: CallFormat, answer: str) -> CallFormat:
    """Return the format as it is written in an answer with calls."""
    body = _body(format.body, answer)
    opening = _spaced(format.open, answer, after=True)
    close = _spaced(format.close, answer, before=True)
    separator = format.separator
    between = re.search(rf"{re.escape(close)}(\s*){re.escape(opening)}", answer)
    if close.strip() and opening.strip() and between is not None:
        separator = between.group(1)
    return replace(
        format,
        body=body,
        open=opening,
        close=close,
        separator=separator,
        section_open=_spaced(format.section_open, answer, after=True),
        section_close=_spaced(format.section_close, answer, before=True),
    )


def _body(body: Body, answer: str) -> Body:
    match body:
        case NamedCall(separator=separator):
            spaced = _spaced(separator, answer, before=True, after=True)
            return replace(body, separator=spaced)
        case TaggedCall():
            return replace(
                body,
                name_end=_spaced(body.name_end, answer, after=True),
                key_close=_spaced(body.key_close, answer, after=True),
                value_open=_spaced(body.value_open, answer, after=True),
                value_close=_spaced(body.value_close, answer, before=True, after=True),
            )
    return body


def _spaced(mark: str, answer: str, *, before: bool = False, after: bool = False) -> str:
    """Return the mark with the white space around its first place in the answer."""
    text = mark.strip()
    found = re.search(rf"(\s*){re.escape(text)}(\s*)", answer) if text else None
    if found is None:
        return mark
    return f"{found.group(1) if before else ''}{text}{found.group(2) if after else ''}"
