"""Problems that the engine process reports: lines for the log, and why it ends."""

from __future__ import annotations

from engine.protocol.message import Message


class Notice(Message, frozen=True):
    """A line for the server's log; `level` is a level of the `logging` module."""

    level: int
    text: str


class Fatal(Message, frozen=True):
    """The engine is about to exit because of an error."""

    message: str  # for the user
    detail: str = ""  # a traceback for the log
    config_error: bool = False  # the configuration or the checkpoint cannot be served


class RemoteTraceback(Exception):
    """Traceback text of the engine process, logged in place of an exception's traceback."""

    def __str__(self) -> str:
        return f"\n{self.args[0].rstrip()}"
