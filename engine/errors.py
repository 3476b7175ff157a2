"""Typed errors of the engine. A message says what was given, the limit, and what to change."""

from __future__ import annotations

import re

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


class EngineError(Exception):
    """Base class of the errors that the engine raises on purpose."""


class ConfigError(EngineError):
    """The configuration or the checkpoint cannot be served; the process exits with status 2.

    The message has one printable line for each argument.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(map(printable, problems)))


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


class RemoteTraceback(Exception):
    """Traceback text of the engine process, logged in place of an exception's traceback."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"
