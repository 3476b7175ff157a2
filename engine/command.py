"""How a command ends that is stopped, or whose output nobody can take: without a traceback.

`python -m engine.command MODULE ...` runs `main` of a module that needs torch. The server's
command, which must not, becomes that process.
"""

from __future__ import annotations

import codecs
import contextlib
import errno
import importlib
import io
import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import TextIO

STOPPED = 128 + signal.SIGINT
UNTOLD = 1  # exit status where the output could not be written

LENIENT = "penstock"  # how stdout writes what it has no bytes for


class OutputError(Exception):
    """Stdout cannot be written. No OSError, of which commands have their own to tell."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"Cannot write to stdout: {cause.strerror}.")
        self.reader_gone = cause.errno == errno.EPIPE


class _Stream(io.FileIO):
    def _write(self, data: bytes) -> int:
        """Waits for the reader, also where another process has made the stream non-blocking, which
        it then is for all that share it."""
        while (count := super().write(data)) is None:
            select.select([], [self], [])
        return count


class _Stdout(_Stream):
    """Fails once. What is left in buffers is written again at their end, which would fail again."""

    _failed = False

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        if self._failed:
            return memoryview(data).nbytes
        try:
            return self._write(data)
        except OSError as error:
            self._failed = True
            raise OutputError(error) from None


class _Stderr(_Stream):
    """Never fails: what is done goes on where nobody can read of it, and ends with its status."""

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        try:
            return self._write(data)
        except OSError:
            return memoryview(data).nbytes


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """Ends the process with status 1 where stdout cannot be written, the disk being full: with a
    line on stderr, but silently where the reader has gone (`| head`)."""
    _open_what_is_closed()
    codecs.register_error(LENIENT, _lenient)
    before = sys.stdout, sys.stderr
    raw = _Stdout(1, "w", closefd=False), _Stderr(2, "w", closefd=False)
    sys.stdout, sys.stderr = map(_text, raw, before)
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputError as error:
        if not error.reader_gone:
            sys.stderr.write(f"penstock: {error}\n")
        raise SystemExit(UNTOLD) from None
    finally:
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def _open_what_is_closed() -> None:
    """Nothing in place of each standard stream that this process was started without (`2>&-`).
    Python has None for it, and a socket opened later would take its number and be written to."""
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)  # the engine's process has it, too
    os.close(number)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _text(raw: io.FileIO, like: TextIO) -> TextIO:
    errors = LENIENT if like.errors == "strict" else like.errors
    unbuffered = getattr(like, "write_through", False)  # PYTHONUNBUFFERED; its stderr has no lines
    by_line = bool(like.line_buffering or unbuffered)
    return io.TextIOWrapper(io.BufferedWriter(raw), like.encoding, errors, line_buffering=by_line)


def _lenient(error: UnicodeError) -> tuple[str | bytes, int]:
    """The bytes of a path that is no text, as they were; ? for what the terminal cannot show."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("replace")(error)


@contextlib.contextmanager
def stopped_at_once() -> Iterator[None]:
    """Within it, imports are: Ctrl-C ends the process there. Raised in the middle of them, an
    exception could become another one, or be lost."""
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # not in a shell's background, where it is ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(STOPPED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def main() -> int:
    """The status of the module's `main`."""
    del sys.argv[0]
    with stopped_at_once():
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        module = importlib.import_module(sys.argv[0])
    try:
        with standard_streams():
            status: int = module.main()
            return status
    except KeyboardInterrupt:
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
