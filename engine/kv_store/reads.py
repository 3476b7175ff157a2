"""Reads: blocks that are read from files by a thread, ahead of their use."""

from __future__ import annotations

import time
from collections.abc import Container, Iterable
from concurrent.futures import Future
from functools import partial

from engine.kv_store.files import BlockFiles, group_of
from engine.kv_store.worker import Worker

READING_BYTES = 32 << 20  # of blocks that are read, or were read and are not used yet
STALL_S = 1.0  # without a block from the disk, after which it counts as stuck


class Reads:
    """Each block is read once, also if several requests wait for it."""

    def __init__(self, files: BlockFiles) -> None:
        self._files = files
        self._reader = Worker("kv-reader")
        self._futures: dict[bytes, Future[memoryview | None]] = {}
        self._last = 0.0  # when a read began or ended; CLOCK_MONOTONIC seconds

    @property
    def unfinished(self) -> list[Future[memoryview | None]]:
        return [future for future in self._futures.values() if not future.done()]

    @property
    def is_stuck(self) -> bool:
        """Whether the disk has not given a block for long."""
        return time.monotonic() > self._last + STALL_S and bool(self.unfinished)

    def start(self, keys: Iterable[bytes]) -> None:
        """Read these blocks, the first ones first: at least one, and up to READING_BYTES."""
        sizes = self._files.sizes
        reading = sum(sizes[group_of(key)] for key in self._futures)
        is_idle = not self.unfinished  # blocks that were read may wait here for long
        for key in keys:
            if key in self._futures:
                continue
            if reading and reading + sizes[group_of(key)] > READING_BYTES:
                return
            if is_idle:
                self._last, is_idle = time.monotonic(), False
            reading += sizes[group_of(key)]
            future: Future[memoryview | None] = self._reader.submit(partial(self._files.read, key))
            future.add_done_callback(self._note)
            self._futures[key] = future

    def _note(self, future: Future[memoryview | None]) -> None:
        self._last = time.monotonic()

    def has(self, key: bytes) -> bool:
        """Whether a block has been read, or has been found to be missing."""
        return key in self._futures and self._futures[key].done()

    def take(self, key: bytes) -> memoryview | None:
        """Return the bytes of a block that `has` names; None if its file is missing or damaged."""
        future = self._futures.pop(key)
        return None if future.exception() else future.result()

    def keep_only(self, wanted: Container[bytes]) -> None:
        """Forget the blocks that no request waits for any more."""
        for key, future in list(self._futures.items()):
            if key not in wanted and (future.cancel() or future.done()):
                del self._futures[key]

    def close(self, until: float) -> None:
        self.keep_only(())
        self._reader.close(until)
