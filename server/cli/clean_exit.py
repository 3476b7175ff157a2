"""Run a command so that Ctrl-C or an unwritable stdout ends it without a traceback.

`python -m server.cli.clean_exit MODULE ...` runs `main` of a module that needs torch. The command
`penstock` must not import torch: it replaces itself with this process.
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
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, NoReturn, TextIO

from engine.client.imports import quick_imports
from server import exit_codes
from server.cli.console import say

STOPPED = 128 + signal.SIGINT
UNTOLD = 1  # exit status if the output could not be written

LENIENT = "penstock"  # codec error handler for text that stdout cannot encode


class OutputError(Exception):
    """Stdout cannot be written. Not an OSError, because commands handle their own OSErrors."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(f"Cannot write to stdout: {cause.strerror}.")
        self.reader_gone = cause.errno == errno.EPIPE


class _Stream(io.FileIO):
    def _write(self, data: bytes) -> int:
        """Write `data`, waiting until the reader takes it.

        A stream may be non-blocking because another process that shares it has made it so.
        """
        while (count := super().write(data)) is None:
            select.select([], [self], [])
        return count


class _Stdout(_Stream):
    """Raises OutputError once, then discards: buffers retry a failed write when they are closed."""

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
    """Never raises: without a reader the command continues and ends with its own status."""

    def write(self, data: bytes, /) -> int:  # type: ignore[override]
        try:
            return self._write(data)
        except OSError:
            return memoryview(data).nbytes


@contextlib.contextmanager
def standard_streams() -> Iterator[None]:
    """End the process with status 1 if stdout cannot be written.

    The reason, such as a full disk, goes to stderr. If the reader is gone (`| head`), nothing does.
    """
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
    """Open os.devnull for each standard stream that is closed (`2>&-`).

    Python sets such a stream to None. A socket opened later would get its file descriptor, and
    output would be written to that socket.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) < 3:
        os.set_inheritable(number, True)  # for the engine process
    os.close(number)
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _text(raw: io.FileIO, like: TextIO) -> TextIO:
    errors = LENIENT if like.errors == "strict" else like.errors
    # PYTHONUNBUFFERED sets it; stderr then has no line buffering.
    unbuffered = getattr(like, "write_through", False)
    by_line = bool(like.line_buffering or unbuffered)
    return io.TextIOWrapper(io.BufferedWriter(raw), like.encoding, errors, line_buffering=by_line)


def _lenient(error: UnicodeError) -> tuple[str | bytes, int]:
    """Write undecodable bytes of a path unchanged, and ? for characters that cannot be encoded."""
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return codecs.lookup_error("replace")(error)


@contextlib.contextmanager
def stopped_at_once() -> Iterator[None]:
    """Let Ctrl-C end the process at once; used around imports.

    A KeyboardInterrupt raised in the middle of an import could be replaced or swallowed.
    """
    usual = signal.getsignal(signal.SIGINT)
    if usual is signal.default_int_handler:  # a shell's background job ignores the signal
        signal.signal(signal.SIGINT, lambda *_: os._exit(STOPPED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, usual)


def run_until_stopped(work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine. SIGTERM cancels it and ends the process with SystemExit.

    A handler that raises would leave the exception in any task, which then logs it at its end.
    """
    import asyncio  # `penstock --help` does not need it

    is_stopped = False

    async def stoppable() -> None:
        task = asyncio.current_task()
        assert task is not None

        def stop() -> None:
            nonlocal is_stopped
            is_stopped = True
            task.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop)
        await work

    before = signal.getsignal(signal.SIGTERM)
    try:
        asyncio.run(stoppable())
    except asyncio.CancelledError:
        if is_stopped:
            raise SystemExit(128 + signal.SIGTERM) from None
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def fail(message: object, status: int, tell: Callable[[str], None] = say) -> Exception:
    """Tell why a command ends, and return the exception that ends it with `status`."""
    import typer  # not at the top: a process that `become` starts does not need it

    tell(f"penstock: {message}")
    return typer.Exit(status)


def become(module: str, *arguments: object) -> NoReturn:
    """Replace this process with one that runs `module`, which may import torch.

    The new process has the same output, receives the signals and returns its own exit status.
    """
    from engine.client.module_command import python_module

    command = [*python_module("server.cli.clean_exit"), module, *map(str, arguments)]
    # A Ctrl-C before `module` can handle it would make Python print a traceback.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        os.execv(command[0], command)
    except OSError as error:  # the system limits the size of a process's arguments
        raise fail(f"Cannot start {module}: {error.strerror}", exit_codes.BAD_CONFIG) from None


def main() -> int:
    """Run `main` of the module named by the first argument; return its exit status."""
    del sys.argv[0]
    with stopped_at_once(), quick_imports():
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
