"""Complete the marks of a format with the white space that a chat template writes around them.

A grammar holds the model to it. For the parser it does not matter.
"""

from __future__ import annotations

from dataclasses import replace

from server.text.parsers.formats import Body, CallFormat, NamedCall, TaggedCall


def with_white_space(format: CallFormat, answer: str) -> CallFormat:
    """Return the format as it is written in an answer with calls."""
    body = _body(format.body, answer)
    opening = _spaced(format.open, answer, after=True)
    close = _spaced(format.close, answer, before=True)
    separator = format.separator
    if close.strip() and opening.strip():
        separator = _between(close, opening, answer, separator)
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
    if not text or text not in answer:
        return mark
    left, _, right = answer.partition(text)
    leading = left[len(left.rstrip()) :] if before else ""
    trailing = right[: len(right) - len(right.lstrip())] if after else ""
    return f"{leading}{text}{trailing}"


def _between(close: str, opening: str, answer: str, default: str) -> str:
    """Return the first white space between the end of a call and the next one."""
    for after in answer.split(close)[1:]:
        rest = after.lstrip()
        if rest.startswith(opening.lstrip()):
            spaces = after[: len(after) - len(rest)]
            lead = opening[: len(opening) - len(opening.lstrip())]
            if spaces.endswith(lead):
                return spaces[: len(spaces) - len(lead)]
    return default
