"""FileIndex: which files there are, how many bytes they take, and which one leaves first."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Sequence
from dataclasses import dataclass

PAGE = 4096  # a file takes whole pages of the disk


@dataclass(slots=True)
class Entry:
    """A file. `used` is when a request last needed it, in ns: later tokens have smaller numbers."""

    size: int
    used: int
    is_changed: bool = False  # `used` is newer than the file's own time


class FileIndex:
    """The files by their paths in the folder, at most `capacity` bytes with those being written.

    The least recently used file leaves first. A request uses a chain of blocks, which is useless
    without its beginning. `used` of block i is the request's arrival less i, so the end of a chain
    leaves before its beginning. All methods may be called in any thread.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._files: dict[str, Entry] = {}
        self._queue: list[tuple[int, str]] = []  # a heap; pairs whose time has changed are skipped
        self._lock = threading.Lock()
        self._bytes = 0

    @property
    def num_bytes(self) -> int:
        return self._bytes

    def __len__(self) -> int:
        return len(self._files)

    def __contains__(self, path: str) -> bool:
        return path in self._files

    def touch(self, paths: Sequence[str], used: int) -> None:
        """Note that a request that arrived at `used` needs these files, the blocks of its chain."""
        with self._lock:
            for place, path in enumerate(paths):
                entry = self._files.get(path)
                if entry is not None and entry.used < used - place:
                    entry.used, entry.is_changed = used - place, True
                    self._push(path, entry)

    def reserve(self, size: int, used: int) -> list[str] | None:
        """Count `size` bytes for a new file. Return the files to delete first.

        They are not in the index any more. Returns None if the new file would be the next to leave.
        """
        size = pages(size)
        with self._lock:
            if size > self.capacity:
                return None
            leaving: list[tuple[str, Entry]] = []
            while self._bytes + size > self.capacity:
                path = self._oldest()
                if path is not None:
                    entry = self._files[path]
                    leaving.append((path, entry))
                    self._drop(path)
                if path is None or entry.used >= used:
                    for kept, entry in leaving:
                        self._put(kept, entry)
                    return None
            self._bytes += size
            return [path for path, _ in leaving]

    def add_reserved(self, path: str, size: int, used: int) -> None:
        """Add a new file, whose bytes are counted already."""
        with self._lock:
            self._bytes -= pages(size)
            self._drop(path)
            self._put(path, Entry(pages(size), used))

    def cancel(self, size: int) -> None:
        """Count the bytes of a file no longer that could not be written."""
        with self._lock:
            self._bytes -= pages(size)

    def add_found(self, path: str, size: int, used: int) -> None:
        """Add a file of an earlier process. `shrink` must follow."""
        with self._lock:
            self._drop(path)
            self._put(path, Entry(pages(size), used))

    def shrink(self) -> list[str]:
        """Return the files to delete so that the others fit. They are not in the index any more."""
        leaving = []
        with self._lock:
            while self._bytes > self.capacity and (path := self._oldest()) is not None:
                self._drop(path)
                leaving.append(path)
        return leaving

    def drop(self, path: str) -> None:
        """Forget a file."""
        with self._lock:
            self._drop(path)

    def take_changed(self) -> list[tuple[str, int]]:
        """Return the files whose own time is older than their last use, once."""
        with self._lock:
            changed = [(path, each) for path, each in self._files.items() if each.is_changed]
            for _, entry in changed:
                entry.is_changed = False
        return [(path, entry.used) for path, entry in changed]

    def _put(self, path: str, entry: Entry) -> None:
        self._files[path] = entry
        self._bytes += entry.size
        self._push(path, entry)

    def _drop(self, path: str) -> None:
        entry = self._files.pop(path, None)
        if entry is not None:
            self._bytes -= entry.size

    def _push(self, path: str, entry: Entry) -> None:
        heapq.heappush(self._queue, (entry.used, path))
        if len(self._queue) > 4 * len(self._files) + 1000:
            self._queue = [(each.used, name) for name, each in self._files.items()]
            heapq.heapify(self._queue)

    def _oldest(self) -> str | None:
        """Return the file that leaves next, and take it from the queue."""
        while self._queue:
            used, path = heapq.heappop(self._queue)
            entry = self._files.get(path)
            if entry is not None and entry.used == used:
                return path
        return None

    def check(self) -> None:
        """Assert the invariants while nothing is being written."""
        assert self._bytes == sum(entry.size for entry in self._files.values()) <= self.capacity
        queued = set(self._queue)
        assert all((each.used, path) in queued for path, each in self._files.items())


def pages(size: int) -> int:
    """Return the bytes that a file of `size` bytes takes on the disk."""
    return -(-size // PAGE) * PAGE
