"""Typed errors at the engine's edges. Each says what was given, the limit, and what to change."""

from __future__ import annotations


class EngineError(Exception):
    """Anything the engine raises on purpose."""


class ConfigError(EngineError):
    """The configuration or the checkpoint cannot be served; the process exits with status 2."""


class RequestRejectedError(EngineError):
    """One request cannot be served; the engine and every other request go on.

    `code` is the OpenAI error code sent to the client, e.g. ``context_length_exceeded``.
    """

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class EngineOverloadedError(EngineError):
    """The waiting queue is at its bound; the client should come back in `retry_after` seconds."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineUnavailableError(EngineError):
    """The engine cannot take work now: `state` is loading, draining or dead."""

    def __init__(self, state: str, message: str) -> None:
        super().__init__(message)
        self.state = state


class EngineDeadError(EngineUnavailableError):
    """The engine process ended; every request it held is lost."""

    def __init__(self, message: str) -> None:
        super().__init__("dead", message)


class RemoteTraceback(Exception):
    """The engine process's own traceback, as text: a log shows it where an exception's would be."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"
