"""The name of a function, in the texts of a format that stand before its arguments."""

from __future__ import annotations

import re

from server.text.parsers.formats import AnyCallFormat, CallFormat, NamedCall

CALLED = re.compile(r"to=(?:functions\.)?(?P<name>[\w.:/-]+)")  # in a header
PLAIN_NAME = r"(?P<name>\S+)"


def named_in(format: AnyCallFormat | None, text: str) -> tuple[str, str | None] | None:
    """Return the name and perhaps the id of a call; None if the text has none."""
    pattern = PLAIN_NAME
    if isinstance(format, CallFormat) and isinstance(format.body, NamedCall):
        pattern = format.body.pattern
    match = re.fullmatch(pattern, text.strip())
    if match is None:
        return None
    return match["name"], match.groupdict().get("id")


def called_by_header(header: str) -> str | None:
    """Return the name of the function that the header of a message names."""
    match = CALLED.search(header)
    return match["name"] if match else None
