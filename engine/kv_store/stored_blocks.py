"""StoredBlocks: keeps blocks in files, and brings those of a new request back before it is queued.

A block that becomes findable is copied between steps and written by a thread. A request whose
prompt has more blocks in files than in memory waits here while another thread reads them. They are
put into the pool as cached blocks, a few between two steps, and the prefix lookup finds them. If
that takes too long, or a file is damaged, the request computes the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass
from typing import Any

from engine.kv_store.block_bytes import BlockBytes
from engine.kv_store.files import ERRORS, BlockFiles, group_of
from engine.kv_store.folder import StoreFolder
from engine.kv_store.prefix import longest_prefix, visible_keys
from engine.kv_store.reads import Reads
from engine.kv_store.saves import Saves
from engine.protocol.generate import Abort, GenerateRequest
from engine.protocol.message import Message
from engine.protocol.outputs import Admission
from engine.scheduling.between import Between, Outcome, RetiredStep
from engine.scheduling.block_pool import cache_key
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence, sequence_of

# Bytes copied between two steps, at least a block: about 1 ms of a CPU. More while no step waits.
COPIED_BYTES, COPIED_BYTES_IDLE = 4 << 20, 32 << 20
LONGEST_WAIT_S = 10.0  # of a request for its blocks
END_S = 0.7  # the end waits this long for writes; the server kills the engine after a second
WAIT_S = 0.01  # how long an engine without other work waits before it looks for messages


@dataclass(slots=True)
class _Waiting:
    """A request that waits until the blocks of `keys` are in the pool, in this order."""

    request: GenerateRequest
    keys: list[bytes]
    until: float  # CLOCK_MONOTONIC seconds
    place: int = 0  # of the next block

    @property
    def rank(self) -> tuple[int, int]:
        return self.request.priority, self.request.id


class StoredBlocks(Between):
    """The part of the loop that keeps blocks in files. `close` lets go of the folder."""

    def __init__(
        self, scheduler: Scheduler, blocks: BlockBytes, files: BlockFiles, folder: StoreFolder
    ) -> None:
        self._scheduler, self._tables, self._pool = scheduler, scheduler.tables, scheduler.pool
        self._blocks, self._files, self._folder = blocks, files, folder
        self._saves, self._reads = Saves(scheduler.pool, blocks, files), Reads(files)
        self._waiting: dict[int, _Waiting] = {}
        self._placed: dict[int, int] = {}  # blocks of requests that were not admitted yet
        self._sequences: dict[int, Sequence] = {}  # unfinished ones whose blocks may be in files
        self._clock = time.time_ns() - time.monotonic_ns()  # of files less CLOCK_MONOTONIC
        self._num_hits = self._num_misses = 0
        scheduler.tables.observers.append(self._registered)
        self._saves.wait_for_scan()

    # ---- the loop ----------------------------------------------------------------------------

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting) or self._saves.is_waiting

    def wait(self) -> None:
        unfinished: list[Future[Any]] = [*self._reads.unfinished, *self._saves.unfinished]
        if unfinished:
            wait(unfinished, WAIT_S, FIRST_COMPLETED)
        else:
            time.sleep(WAIT_S)

    def handle(self, message: Message) -> bool:
        match message:
            case GenerateRequest() if not message.adapter and message.ablation is None:
                return self._keep(message)
            case Abort():
                for request_id in message.ids:
                    self._forget(request_id)
        return False

    def admitted(self, admission: Admission) -> Admission:
        self._placed.pop(admission.id, None)
        return admission

    def work(self, *, is_quiet: bool) -> Outcome | None:
        if not self.is_waiting:
            return None
        budget = COPIED_BYTES if self._scheduler.has_work else COPIED_BYTES_IDLE
        ready, copied = self._bring_back(budget)
        copied += self._saves.copy(budget - copied)
        return Outcome(ready) if ready or copied else None

    def stepped(self, retired: RetiredStep) -> None:
        for output in retired.outputs:
            if output.finish == "error" and output.id in self._sequences:
                self._delete(self._sequences[output.id])
            if output.finish:
                self._forget(output.id)

    def close(self) -> None:
        until = time.monotonic() + END_S
        self._saves.close(until)
        self._reads.close(until)
        self._folder.close()

    def _forget(self, request_id: int) -> None:
        if self._waiting.pop(request_id, None) is not None:
            self._reads.keep_only(set(self._wanted()))
        self._placed.pop(request_id, None)
        self._sequences.pop(request_id, None)

    # ---- from the pool to files --------------------------------------------------------------

    def _registered(self, sequence: Sequence, index: int) -> None:
        """Note a block that has become findable.

        The number of an adapter has another meaning in the next process.
        """
        if sequence.adapter or sequence.ablation_key:
            return
        self._sequences[sequence.id] = sequence
        used = self._used(sequence) - index
        for number in range(len(self._tables.groups)):
            self._saves.add(cache_key(sequence.hashes[index], number), used)

    def _used(self, sequence: Sequence) -> int:
        """Return when a request arrived, in ns of the clock of files."""
        return self._clock + int(sequence.arrival * 1e9)

    def _delete(self, sequence: Sequence) -> None:
        """Delete the blocks of a request that failed: they may contain NaN."""
        for digest in sequence.hashes:
            for number in range(len(self._tables.groups)):
                self._saves.delete(cache_key(digest, number))

    # ---- from files to the pool --------------------------------------------------------------

    def _keep(self, request: GenerateRequest) -> bool:
        """Let a request wait here if there are files of blocks that the pool does not have."""
        sequence = sequence_of(request)
        size, groups = self._tables.block_size, self._tables.groups
        in_memory = self._tables.num_cached(sequence) // size
        hashes = sequence.hashes[: sequence.num_skippable // size]
        for number in range(len(groups)):
            keys = [cache_key(digest, number) for digest in hashes]
            self._files.touch(keys, self._used(sequence))
        length = longest_prefix(hashes, groups, size, self._is_known)
        self._num_misses += len(hashes) - max(length, in_memory)
        if length <= in_memory or self._reads.is_stuck:
            return False
        keys = visible_keys(hashes[:length], groups, size)
        until = time.monotonic() + LONGEST_WAIT_S
        self._waiting[request.id] = _Waiting(request, keys, until)
        self._sequences[request.id] = sequence
        return True

    def _is_known(self, key: bytes) -> bool:
        return bool(self._pool.find(key)) or self._files.has(key)

    def _bring_back(self, budget: int) -> tuple[list[GenerateRequest], int]:
        """Put blocks of up to `budget` bytes into the pool, and read further ones.

        Returns the requests that need not wait any more, and the bytes that were copied.
        """
        ready: list[GenerateRequest] = []
        copied = 0
        for waiting in sorted(self._waiting.values(), key=lambda each: each.rank):
            copied += self._place(waiting, budget - copied)
            is_late = self._reads.is_stuck or time.monotonic() > waiting.until
            if is_late or waiting.place == len(waiting.keys):
                ready.append(waiting.request)
                del self._waiting[waiting.request.id]
        if ready:
            self._reads.keep_only(set(self._wanted()))
        self._reads.start(self._wanted())
        return ready, copied

    def _wanted(self) -> Iterator[bytes]:
        """Yield the keys of the blocks that requests wait for, those needed first at first."""
        for waiting in sorted(self._waiting.values(), key=lambda each: each.rank):
            for key in waiting.keys[waiting.place :]:
                if not self._pool.find(key):
                    yield key

    def _place(self, waiting: _Waiting, budget: int) -> int:
        """Put the next blocks of a request into the pool; return how many bytes were copied.

        They are evicted after all others, the last ones of the prompt first.
        """
        pool, keys = self._pool, waiting.keys
        chain = [block for block in map(pool.find, keys) if block]
        pool.hold(chain)  # a new block must not evict one of these
        copied = 0
        while waiting.place < len(keys):
            key = keys[waiting.place]
            if pool.find(key):
                waiting.place += 1
                continue
            if copied >= budget or not self._reads.has(key) or not self._has_room(waiting):
                break
            payload = self._reads.take(key)
            if payload is None:
                self._num_misses += 1
                waiting.keys = keys = keys[: waiting.place]
                break
            [block] = pool.allocate(1)
            chain.append(block)
            self._blocks.copy_in(group_of(key), block, payload)
            pool.register(block, key)
            copied += len(payload)
            self._num_hits += 1
            self._placed[waiting.request.id] = self._placed.get(waiting.request.id, 0) + 1
        pool.release(chain)
        return copied

    def _has_room(self, waiting: _Waiting) -> bool:
        """Whether one more block may evict another one.

        Blocks of requests that are not admitted yet are half of those available at most. Otherwise
        they would evict each other before they are used. The first request that waits here may take
        more if no other is about to be admitted.
        """
        available, placed = self._pool.num_available, sum(self._placed.values())
        if placed < available // 2:
            return True
        is_next = waiting is min(self._waiting.values(), key=lambda each: each.rank)
        return available > 0 and is_next and self._placed.keys() <= self._waiting.keys()

    # ---- measurements ------------------------------------------------------------------------

    def gauges(self) -> dict[str, float]:
        """Return the counts of blocks since the start, and the bytes of all files."""
        files = self._files
        counts: dict[str, float] = {
            "kv_store_hits": self._num_hits,
            "kv_store_misses": self._num_misses,
            "kv_store_writes": files.num_written,
            "kv_store_evictions": files.num_evicted,
            "kv_store_bytes": files.index.num_bytes,
        }
        return counts | {f"kv_store_errors_{name}": files.errors[name] for name in ERRORS}
