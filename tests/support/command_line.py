"""Run `penstock` in this process, which takes a tenth of the time of a process of its own."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any
from unittest import mock

import pytest

from server.cli.main import app

PATH = "/usr/bin:/bin"


def penstock(*arguments: str, said: str = "", **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the command with `said` as its stdin and nothing but `environ` and PATH set.

    The result is that of `subprocess.run`. A command that would replace this process by another one
    fails the test.
    """
    stdin = io.TextIOWrapper(io.BytesIO(said.encode()), encoding="utf-8")
    with (
        mock.patch.dict(os.environ, {"PATH": PATH, **environ}, clear=True),
        mock.patch.object(sys, "stdin", stdin),
        mock.patch.object(os, "execv", _refuse),
        mock.patch.object(os, "execve", _refuse),
        _signals_kept(),
        _logging_as_at_start(),
        _captured(1) as stdout,
        _captured(2) as stderr,
    ):
        code = _status(arguments)
    return subprocess.CompletedProcess(arguments, code, stdout.getvalue(), stderr.getvalue())


def _status(arguments: tuple[str, ...]) -> int:
    with pytest.raises(SystemExit) as end:  # typer always raises it
        app(list(arguments), prog_name="penstock")
    return int(end.value.code or 0)


def _refuse(path: str, command: list[str], environ: object = None) -> Any:
    raise AssertionError(f"this would replace the process of the tests: {command}")


@contextlib.contextmanager
def _logging_as_at_start() -> Iterator[None]:
    """Hide the handlers that earlier tests have configured, and remove those of the command."""
    root = logging.getLogger()
    before = root.handlers, root.level
    root.handlers = []
    root.setLevel(logging.WARNING)
    try:
        yield
    finally:
        root.handlers = before[0]
        root.setLevel(before[1])


@contextlib.contextmanager
def _signals_kept() -> Iterator[None]:
    """Restore the signal handlers that a command installs."""
    before: Mapping[signal.Signals, Any] = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _captured(number: int) -> Iterator[io.StringIO]:
    """Yield what is written to a file descriptor; it is complete when the context ends."""
    found = io.StringIO()
    before = os.dup(number)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), number)
        try:
            yield found
        finally:
            os.dup2(before, number)
            os.close(before)
            file.seek(0)
            found.write(file.read().decode())
