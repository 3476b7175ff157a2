"""How a command ends that is stopped, or whose output nobody can take: without a traceback.

`python -m engine.command MODULE ...` runs `main` of a module that needs torch. The server's
command, which must not, becomes that process.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator

STOPPED = 128 + signal.SIGINT
UNTOLD = 1  # exit status where the output could not be written


class OutputError(Exception):
    """Stdout cannot be written. No OSError, of which commands have their own to tell."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"Cannot write to stdout: {cause.strerror}.")
        self.reader_gone = cause.errno == errno.EPIPE


class _Stdout(io.FileIO):
    """Fails once. What is left in buffers is written again at their end, which would fail again."""

    _failed = False

    def write(self, data: bytes, /) -> int | None:  # type: ignore[override]
        if self._failed:
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self._failed = True
            raise OutputError(error) from None


@contextlib.contextmanager
def output_told() -> Iterator[None]:
    """Ends the process with status 1 where stdout cannot be written, the disk being full: with a
    line on stderr, but silently where the reader has gone (`| head`)."""
    before = sys.stdout
    raw = _Stdout(1, "w", closefd=False)
    sys.stdout = io.TextIOWrapper(
        io.BufferedWriter(raw), before.encoding, before.errors, line_buffering=raw.isatty()
    )
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except OutputError as error:
        if not error.reader_gone:
            with contextlib.suppress(OSError):
                os.write(2, f"penstock: {error}\n".encode())
        raise SystemExit(UNTOLD) from None
    finally:
        sys.stdout = before


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
        with output_told():
            status: int = module.main()
            return status
    except KeyboardInterrupt:
        return STOPPED


if __name__ == "__main__":
    sys.exit(main())
