"""The results of a batch: two files that only grow, one for answers and one for errors.

A killed process loses at most the results of unfinished lines. `Results` drops a last line that was
written in part, so that each line of the input has exactly one result in the end.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from server.batch.threads import in_thread

PREFIX = b'{"id":"batch_req_'
SYNC_S = 1.0  # results reach the disk at most this much later


class ResultsError(Exception):
    """The files cannot be used for results. The message says which one and why."""


class _Custom(msgspec.Struct, frozen=True):
    custom_id: str


_CUSTOM = msgspec.json.Decoder(_Custom)


def result_line(
    custom_id: str, response: dict[str, Any] | None, error: dict[str, Any] | None
) -> bytes:
    """Return a line of the output in OpenAI's format."""
    line = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": response,
        "error": error,
    }
    return msgspec.json.encode(line) + b"\n"


class Results:
    """The results of one batch, open for appending.

    `reserve` counts bytes before a write; `release` gives back those that are not in the files.
    Opening reads the results of an earlier run. Raises ResultsError if a file has other content or
    another process writes to it.
    """

    def __init__(
        self,
        output: Path,
        errors: Path,
        reserve: Callable[[int], None] = lambda size: None,
        release: Callable[[int], None] = lambda size: None,
    ) -> None:
        self.done: set[str] = set()
        self._reserve = reserve
        self._release = release
        self._synced_at = time.monotonic()
        self._files: list[ResultFile] = []
        try:
            for path in (output, errors):
                self._files.append(ResultFile(path, self.done, release))
        except BaseException:
            self.close()
            raise

    @property
    def completed(self) -> int:
        return self._files[0].lines

    @property
    def failed(self) -> int:
        return self._files[1].lines

    async def add(self, custom_id: str, line: bytes, *, failed: bool) -> None:
        """Append the result of a line. Raises OSError, or what `reserve` raises."""
        self._reserve(len(line))
        try:
            self._files[failed].append(line)
        except OSError:
            self._release(len(line))
            raise
        self.done.add(custom_id)
        if time.monotonic() - self._synced_at > SYNC_S:
            self._synced_at = time.monotonic()
            await in_thread(self.sync)

    def sync(self) -> None:
        """Wait until all results are on the disk."""
        for file in self._files:
            file.sync()

    def close(self) -> None:
        for file in self._files:
            file.close()


class ResultFile:
    """One file of results. Opening it adds the custom_ids of its lines to `done`.

    `release` gets the bytes of a last line that was written in part.
    """

    def __init__(self, path: Path, done: set[str], release: Callable[[int], None]) -> None:
        self.lines = 0
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._lock(path)
            complete = self._read(path, done)
            size = os.fstat(self._descriptor).st_size
            os.ftruncate(self._descriptor, complete)
            release(size - complete)
        except BaseException:
            os.close(self._descriptor)
            raise

    def _lock(self, path: Path) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ResultsError(f"Another process writes to {path}.") from None

    def _read(self, path: Path, done: set[str]) -> int:
        """Read the results so far, and return the bytes of the complete ones."""
        complete = 0
        with path.open("rb") as file:
            for raw in file:
                if not complete and not (raw.startswith(PREFIX) or PREFIX.startswith(raw)):
                    raise ResultsError(f"{path} has other content; name another file.")
                custom_id = _custom_id(raw)
                if custom_id is None:
                    break
                if custom_id in done:
                    raise ResultsError(f"{path} has a second result of {custom_id[:128]!r}.")
                done.add(custom_id)
                complete += len(raw)
                self.lines += 1
        return complete

    def append(self, line: bytes) -> None:
        """Write one line. If the disk is full, none of it remains, and OSError is raised."""
        size = os.fstat(self._descriptor).st_size
        view = memoryview(line)
        try:
            while view:
                view = view[os.write(self._descriptor, view) :]
        except OSError:
            os.ftruncate(self._descriptor, size)
            raise
        self.lines += 1

    def sync(self) -> None:
        if self._descriptor >= 0:
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file, which releases its lock. A second call does nothing."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _custom_id(raw: bytes) -> str | None:
    """Return the custom_id of a complete line, or None if the line was written in part."""
    if not raw.endswith(b"\n"):
        return None
    try:
        return _CUSTOM.decode(raw).custom_id
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
