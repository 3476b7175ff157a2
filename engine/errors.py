"""Typed errors of the engine. A message says what was given, the limit, and what to change."""

from __future__ import annotations

import re
from collections.abc import Collection
from itertools import islice

# Includes the line and paragraph separators, because some log viewers break lines there, and the
# overrides of direction, which show a text in another order than it has.
CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202d\u202e]")


def printable(text: str) -> str:
    """Return `text` as one line, with its control characters as visible escapes.

    A name in a checkpoint or a request could otherwise forge log lines or control a terminal.
    """
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def one_line(error: Exception) -> str:
    """Return the message of another library's error, whose lines and indents become spaces."""
    return " ".join(str(error).split())


MAX_LINE = 2000  # characters of a message; the architectures that are served take 500
MAX_NAME = 200
NUM_NAMED = 5


def clipped(text: str, most: int = MAX_LINE) -> str:
    """Return `text`; of one with more than `most` characters, the beginning, the end and the size.

    A checkpoint may have names of megabytes.
    """
    if len(text) <= most:
        return text
    end = most // 4
    begin = most - end
    return f"{text[:begin]}… ({len(text) - most} characters left out) …{text[-end:]}"


def listed(names: Collection[object], most: int = NUM_NAMED) -> str:
    """Return the first names and the number of the others, for a message."""
    first = ", ".join(clipped(str(name), MAX_NAME) for name in islice(names, most))
    return f"{first} and {len(names) - most} more" if len(names) > most else first


class EngineError(Exception):
    """Base class of the errors that the engine raises on purpose."""


class ConfigError(EngineError):
    """The configuration or the checkpoint cannot be served; the process exits with status 2.

    The message has one printable line for each argument, with MAX_LINE characters or little more.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(printable(clipped(problem)) for problem in problems))


class RequestRejectedError(EngineError):
    """One request cannot be served; the engine and all other requests continue.

    `code` is the OpenAI error code sent to the client, e.g. ``context_length_exceeded``; `param`
    names the request's field at fault.
    """

    def __init__(self, code: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.param = param


class EngineOverloadedError(EngineError):
    """The waiting queue is full; the client should retry after `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineUnavailableError(EngineError):
    """The engine accepts no requests now; `state` is "loading", "draining" or "dead"."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state = state


class EngineDeadError(EngineUnavailableError):
    """The engine process ended, and all of its requests are lost."""

    def __init__(self, message: str) -> None:
        super().__init__("dead", message)


# Texts of errors, most of them RuntimeErrors, for memory of the host: torch's, that of a file which
# cannot be mapped, and that of a thread without room for its stack.
OUT_OF_MEMORY = ("can't allocate memory", "Cannot allocate memory", "can't start new thread")


def lacks_host_memory(error: Exception) -> bool:
    """Return whether an error means that the host had not enough memory."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in OUT_OF_MEMORY)
