"""Blocks that are read ahead, by a disk that the test slows down."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from engine.kv_store import reads
from engine.kv_store.reads import Reads
from tests.support.process import eventually

KEYS = [bytes([number]) * 16 + b"\0\0" for number in range(3)]


class Disk:
    """The files of blocks of one byte; `read` waits for `may_go_on`."""

    def __init__(self) -> None:
        self.sizes = {0: 1}
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def read(self, key: bytes) -> memoryview:
        self.may_go_on.wait(20)
        return memoryview(key[:1])


@pytest.fixture
def disk() -> Iterator[Disk]:
    made = Disk()
    yield made
    made.may_go_on.set()


def test_disk_is_not_stuck_because_nothing_was_read_for_a_while(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block that was read may wait for room in the pool; the next read starts its own time."""
    clock = [100.0]
    monkeypatch.setattr(reads, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    files: Any = disk
    ahead = Reads(files)
    ahead.start(KEYS[:1])
    eventually(lambda: ahead.has(KEYS[0]), "the block is read", 20)
    clock[0] += 5 * reads.STALL_S
    disk.may_go_on.clear()
    ahead.start(KEYS)
    assert ahead.unfinished
    assert not ahead.is_stuck
    clock[0] += 1.1 * reads.STALL_S
    assert ahead.is_stuck
    disk.may_go_on.set()
    eventually(lambda: ahead.has(KEYS[2]), "all are read", 20)
    assert not ahead.is_stuck
