"""The notes of all ranks about what they are doing, in memory that their processes share.

A rank that is stopped, or that waits for something that never comes, keeps the others waiting
inside a sum. Time alone does not show this: a rank may compile a kernel for minutes. So each rank
notes what it is doing, and rank 0 watches (`engine/parallel/stall.py`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

IDLE, COMPUTES, WAITS = 0, 1, 2
FIELDS = 2  # of 8 bytes each: moves, activity
RANK_BYTES = 8 * FIELDS


class RankActivity(NamedTuple):
    """The activity of a rank, and how often it has begun another one."""

    moves: int
    activity: int


class Board:
    """The notes of `count` ranks; this process is number `own`. Without a `path`, it is alone.

    Only the main thread of a rank writes to its part.
    """

    def __init__(self, own: int = 0, count: int = 1, path: str | None = None) -> None:
        """`path` is a file of `count` times RANK_BYTES, zero at first."""
        self.count = count
        size = count * RANK_BYTES
        self._mapping: mmap.mmap | None = None
        memory = memoryview(bytearray(size))
        if path is not None:
            file = os.open(path, os.O_RDWR)
            self._mapping = mmap.mmap(file, size)
            os.close(file)
            memory = memoryview(self._mapping)
        self._fields = memory.cast("q")
        self._first = own * FIELDS

    def compute(self) -> None:
        """Begin to compute: other ranks may wait for this one, and it uses its CPU."""
        self._note(COMPUTES)

    def wait(self) -> None:
        """Begin to wait for the device, which may wait for other ranks."""
        self._note(WAITS)

    def rest(self) -> None:
        """Wait for a message: no rank needs anything of this one."""
        self._note(IDLE)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Wait for other ranks inside a computation. Without one, as during loading, it is not
        noted: then a rank may wait until another has read its weights."""
        if self._fields[self._first + 1] != COMPUTES:
            yield
            return
        self._note(WAITS)
        yield
        self._note(COMPUTES)

    def close(self) -> None:
        """Unmap the memory. Nothing can be noted or read afterwards."""
        self._fields.release()
        if self._mapping is not None:
            self._mapping.close()

    def read(self) -> list[RankActivity]:
        """Return what each rank is doing."""
        fields = self._fields.tolist()
        return [RankActivity(*fields[at : at + FIELDS]) for at in range(0, len(fields), FIELDS)]

    def _note(self, activity: int) -> None:
        self._fields[self._first] += 1
        self._fields[self._first + 1] = activity
