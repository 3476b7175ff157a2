"""Worker: one thread that runs functions in their order."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Worker:
    """It is a daemon, so that a disk that hangs does not keep the process from ending."""

    def __init__(self, name: str, niceness: int = 0) -> None:
        """The kernel runs threads of other processes and of this one first, by `niceness`."""
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]
        self._jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(niceness,), name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        """Let the thread call a function."""
        future: Future[Any] = Future()
        self._jobs.put((future, function))
        return future

    def close(self, until: float) -> None:
        """Wait for all functions, but not beyond `until` (CLOCK_MONOTONIC seconds)."""
        self._jobs.put(None)
        self._thread.join(max(0.0, until - time.monotonic()))

    def _run(self, niceness: int) -> None:
        if niceness:
            with contextlib.suppress(OSError):  # on Linux this is of the thread alone
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        while (job := self._jobs.get()) is not None:
            future, function = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:  # raised where the result is taken
                future.set_exception(error)
