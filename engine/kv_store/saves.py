"""Saves: the blocks that are to be written to files, and the thread that writes them."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from concurrent.futures import Future
from functools import partial

from engine.kv_store.block_bytes import BlockBytes
from engine.kv_store.files import BlockFiles, group_of
from engine.kv_store.worker import Worker
from engine.scheduling.block_pool import BlockPool

log = logging.getLogger(__name__)

WRITING_BYTES = 64 << 20  # of blocks copied for the writer; others wait in the pool
NICENESS = 10  # steps and reads go first
SCAN_S = 2.0  # the start waits this long for the list of files


class Saves:
    """A block waits in the pool until the writer has room. If it is evicted, it is not saved."""

    def __init__(self, pool: BlockPool, blocks: BlockBytes, files: BlockFiles) -> None:
        self._pool, self._blocks, self._files = pool, blocks, files
        self._writer = Worker("kv-writer", NICENESS)
        self._waiting: OrderedDict[bytes, int] = OrderedDict()  # keys, with `used` of FileIndex
        self._writing: dict[Future[None], int] = {}  # with their bytes
        self._has_warned = False
        scan: Future[None] = self._writer.submit(files.scan)  # before any write: it counts bytes
        scan.add_done_callback(self._note_failure)
        self._scan = scan

    def wait_for_scan(self) -> None:
        """Wait until the files of earlier processes are known, but not long."""
        deadline = time.monotonic() + SCAN_S
        while not self._scan.done() and time.monotonic() < deadline:
            time.sleep(0.001)

    @property
    def is_waiting(self) -> bool:
        """Whether blocks wait to be copied."""
        return bool(self._waiting)

    @property
    def unfinished(self) -> list[Future[None]]:
        return [future for future in self._writing if not future.done()]

    def add(self, key: bytes, used: int) -> None:
        """Note a block that is findable, or becomes so in the step that is scheduled."""
        if self._files.has(key):
            self._files.touch([key], used)
            return
        self._waiting[key] = max(used, self._waiting.get(key, used))
        if len(self._waiting) > self._pool.num_blocks:
            self._waiting.popitem(last=False)  # its block has been reused since

    def copy(self, budget: int) -> int:
        """Copy blocks for the writer until `budget` bytes are used up; return how many were.

        At least one is copied if there is room. All steps that fill them have been launched.
        """
        for future in [future for future in self._writing if future.done()]:
            del self._writing[future]
        copied = 0
        room = WRITING_BYTES - sum(self._writing.values())
        while self._waiting and copied < min(budget, room):
            key, used = self._waiting.popitem(last=False)
            block = self._pool.find(key)
            if block and not self._files.has(key):
                copied += self._write(key, used, block)
        self._warn()
        return copied

    def _write(self, key: bytes, used: int, block: int) -> int:
        group = group_of(key)
        copy = self._blocks.copy_out(group, block)

        def write() -> None:
            [saved] = copy.wait()
            self._files.write(key, used, saved.numpy().data)

        future: Future[None] = self._writer.submit(write)
        future.add_done_callback(self._note_failure)
        size = self._blocks.sizes[group]
        self._writing[future] = size
        return size

    def delete(self, key: bytes) -> None:
        """Delete the file of a block, also if it is being written."""
        self._waiting.pop(key, None)
        self._writer.submit(partial(self._files.delete, key))

    def close(self, until: float) -> None:
        """Write what waits, but not beyond `until` (CLOCK_MONOTONIC seconds)."""
        while self._waiting and time.monotonic() < until:
            if not self.copy(WRITING_BYTES):
                time.sleep(0.005)
        self._writer.submit(self._files.save_times)
        self._writer.close(until)

    def _note_failure(self, future: Future[None]) -> None:
        error = future.exception()
        if error is not None:
            self._files.errors["write"] += 1
            self._files.problem = f"{type(error).__name__}: {error}"

    def _warn(self) -> None:
        if self._files.problem and not self._has_warned:
            self._has_warned = True
            log.warning(
                "--kv-cache-dir: blocks cannot be written (%s). Requests are served without it; "
                "penstock:kv_store_errors_* count.",
                self._files.problem,
            )
