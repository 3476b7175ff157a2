"""Write the server's start-up and shutdown messages to stderr, as text or as log records."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable
from typing import Literal

from engine.errors import printable
from server.config import ServerConfig

KEPT = re.compile(r"[^\n\t]+")  # `visible` leaves only line breaks and tabs as they are


def say(text: str) -> None:
    """Write lines of text to stderr, without control characters; stdout is for data.

    Errors are ignored, so that a full disk or a closed pipe does not stop the server.
    """
    with contextlib.suppress(OSError, ValueError):
        lines = "\n".join(map(printable, text.split("\n")))
        sys.stderr.write(lines + "\n")
        sys.stderr.flush()


def visible(text: str) -> str:
    """Return a text of a model or a server for the terminal, with its line breaks and tabs.

    Other control characters become visible escapes: they could set the window's title, write to
    the clipboard or hide a part of the text. A piece of a stream needs no other pieces, because an
    escape sequence is harmless without its first character.
    """
    text = text.replace("\r\n", "\n")
    return KEPT.sub(lambda match: printable(match[0]), text)


def logger_for(
    config: ServerConfig, level: Literal["info", "warning", "error"] = "info"
) -> Callable[[str], None]:
    """Return a function that writes a message: `say`, or with `--log-format json` a log function.

    With JSON every line that Penstock writes to stderr is then a log record.
    """
    if config.log_format != "json":
        return say
    import structlog  # not at the top, so that `--help` does not import it

    write = getattr(structlog.get_logger("server.life"), level)

    def record(text: str) -> None:
        for line in filter(str.strip, text.splitlines()):
            write(line.strip().removeprefix("penstock: ").removeprefix("warning: "))

    return record
