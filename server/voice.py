"""How the server tells of its life on stderr: text for a person, or records of the log."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Literal

from server.config import ServerConfig


def say(text: str) -> None:
    """Text for the person at the terminal; stdout stays free for data. Where nobody can read it,
    the disk being full or the log's reader gone, what the server does goes on all the same."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def voice(
    config: ServerConfig, level: Literal["info", "warning", "error"] = "info"
) -> Callable[[str], None]:
    """`say`, or with --log-format json what writes records of the log as `server.logging` has set
    it up, so that no line of ours on stderr is anything else."""
    if config.log_format != "json":
        return say
    import structlog  # here, so that `--help` need not pay for it

    write = getattr(structlog.get_logger("server.life"), level)

    def record(text: str) -> None:
        for line in filter(str.strip, text.splitlines()):
            write(line.strip().removeprefix("penstock: ").removeprefix("warning: "))

    return record
