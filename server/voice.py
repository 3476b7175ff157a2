"""How the server tells of its life on stderr: text for a person, or records of the log."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from typing import Literal

from server.config import ServerConfig


def open_what_is_closed() -> None:
    """Nothing in place of each standard stream that this process was started without (`2>&-`).
    Python has None for it, and a socket opened later would take its number and be written to."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)  # the engine's process has it, too
    os.close(number)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def say(text: str) -> None:
    """Text for the person at the terminal; stdout stays free for data. Where nobody can read it,
    the disk being full or the log's reader gone, what the server does goes on all the same."""
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def fall_silent() -> None:
    """For the end of the process: what could not be written would be tried once more, and Python
    make the exit status 120 of that."""
    try:
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


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
