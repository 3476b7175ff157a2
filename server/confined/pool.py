"""ConfinedPool: several processes that do the same work under limits."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, Protocol, TypeVar

from server.confined.process import ConfinedError


class Worker(Protocol):
    """A user of one ConfinedProcess."""

    @property
    def is_running(self) -> bool: ...

    def close(self) -> None: ...


WorkerT = TypeVar("WorkerT", bound=Worker)
Result = TypeVar("Result")


class ConfinedPool(Generic[WorkerT]):
    """Thread-safe. Starts a worker if all others are busy, and at most `size` of them.

    `start` returns a worker. `name` is that of the pool's threads.
    """

    def __init__(self, start: Callable[[], WorkerT], size: int, name: str) -> None:
        self._start_worker = start
        self._size = size
        self._idle: queue.LifoQueue[WorkerT] = queue.LifoQueue()
        self._all: set[WorkerT] = set()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(size, name)
        # Also at the interpreter's exit.
        self.close = weakref.finalize(self, _close, self._all, self._threads)

    def start_one(self) -> None:
        """Start a worker now, so that it gets ready before the first call."""
        with self._lock:
            self._idle.put(self._start())

    @contextlib.contextmanager
    def lend(self) -> Iterator[WorkerT]:
        """Lend an idle worker. Replace it if the body raises ConfinedError."""
        worker = self._take()
        try:
            yield worker
        except ConfinedError:
            worker = self._replace(worker)
            raise
        finally:
            self._idle.put(worker)

    async def in_thread(self, work: Callable[[], Result]) -> Result:
        """Run `work`, which lends a worker, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    def _take(self) -> WorkerT:
        with contextlib.suppress(queue.Empty):
            worker = self._idle.get_nowait()
            return worker if worker.is_running else self._replace(worker)
        with self._lock:
            if len(self._all) < self._size:
                return self._start()
        return self._idle.get()

    def _start(self) -> WorkerT:
        worker = self._start_worker()
        self._all.add(worker)
        return worker

    def _replace(self, worker: WorkerT) -> WorkerT:
        worker.close()
        with self._lock:
            self._all.discard(worker)
            return self._start()


def _close(workers: set[WorkerT], threads: ThreadPoolExecutor) -> None:
    """Kill the processes; a call that waits for one then fails."""
    for worker in list(workers):
        worker.close()
    threads.shutdown(wait=False)
