"""RecordFile: the open file of --record. A thread writes it, so that a slow disk delays nothing."""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
from collections import deque

import msgspec
import structlog

from engine.errors import ConfigError
from server.replay.recorded import RecordedAnswer

MAX_TOKENS_WAITING = 16 << 20  # of answers that are not written yet; about 8 bytes each in memory
CLOSE_S = 10.0  # that the last lines may take at the end of the server

log = structlog.get_logger("server.record")


class RecordFile:
    """Appends one line per answer. `add` never blocks or raises: a lost line is a logged warning.

    The constructor opens the file, which only this user can read. Raises ConfigError.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._file = _opened(path)
        self._waiting: deque[RecordedAnswer] = deque()
        self._tokens = 0  # in `_waiting`
        self._is_closed = False
        self._is_losing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._work, name="record", daemon=True)
        self._thread.start()

    def add(self, answers: list[RecordedAnswer]) -> None:
        """Hand the answers of one request to the thread that writes them."""
        size = sum(len(answer.prompt_ids) + len(answer.tokens) for answer in answers)
        with self._changed:
            if self._is_closed or self._tokens + size > MAX_TOKENS_WAITING:
                self._warn("they wait for a slow disk" if not self._is_closed else "it is closed")
                return
            self._waiting.extend(answers)
            self._tokens += size
            self._changed.notify()

    def close(self) -> None:
        """Write what waits, for at most CLOSE_S seconds. A second call does nothing."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        self._thread.join(CLOSE_S)

    def _work(self) -> None:
        while answers := self._next():
            lines = b"".join([msgspec.json.encode(answer) + b"\n" for answer in answers])
            try:
                _append(self._file, lines)
            except OSError as error:
                self._warn(error.strerror or "the disk failed")
            else:
                self._is_losing = False
        os.close(self._file)

    def _next(self) -> list[RecordedAnswer]:
        """Wait for answers and return them; none after the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            answers = list(self._waiting)
            self._waiting.clear()
            self._tokens = 0
        return answers

    def _warn(self, reason: str) -> None:
        """Log that answers are lost, once until a line can be written again."""
        if not self._is_losing:
            log.warning("answers are not recorded", path=self.path, reason=reason)
        self._is_losing = True


def _opened(path: str) -> int:
    """Open a file to append to it, and lock it. Raises ConfigError."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"--record: {path} cannot be opened: {error.strerror}.") from None
    try:
        if stat.S_ISREG(os.fstat(file).st_mode):
            os.fchmod(file, 0o600)  # also if an earlier program has made it
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(file)
        reason = error.strerror
        if isinstance(error, BlockingIOError):
            reason = "another server records to it"
        raise ConfigError(f"--record: {path} cannot be used: {reason}.") from None
    return file


def _append(file: int, data: bytes) -> None:
    """Write all of `data`, or nothing of it. Raises OSError."""
    before = os.fstat(file).st_size
    rest = memoryview(data)
    try:
        while rest:
            rest = rest[os.write(file, rest) :]
    except OSError:
        with contextlib.suppress(OSError):  # a device has no length
            os.ftruncate(file, before)
        raise
