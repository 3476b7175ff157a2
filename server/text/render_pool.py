"""RenderPool: the processes that render one chat template."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from engine.client.module_command import python_module
from server.text import exact_json
from server.text.chat_template import TemplateLimitError
from server.text.confined import ConfinedError, ConfinedProcess, Limits

# Most published templates take milliseconds.
LIMITS = Limits(memory=256 << 20, seconds=1.5, memory_per_byte=16)
MAX_PROCESSES = 2  # renderings at the same time


class RenderProcess:
    """A process with a template. It compiles the template while the caller does other work."""

    def __init__(self, source: bytes) -> None:
        self._process = ConfinedProcess(python_module("server.text.template_sandbox"), LIMITS)
        self._process.send(source)
        self._compiled: dict[str, Any] | None = None

    @property
    def is_running(self) -> bool:
        return self._process.is_running

    def compiled(self) -> dict[str, Any]:
        """Return the variables that the template reads, or how it is broken."""
        if self._compiled is None:
            self._compiled = json.loads(self._process.receive())
        return self._compiled

    def render(self, context: dict[str, Any]) -> dict[str, str]:
        """Return the text, or the error of the template. Raises ConfinedError."""
        self.compiled()
        answer: dict[str, str] = json.loads(self._process.call(exact_json.text(context).encode()))
        return answer

    def close(self) -> None:
        self._process.close()


class RenderPool:
    """Thread-safe: one process from the start, and a second one while that is busy."""

    def __init__(self, source: bytes) -> None:
        self._source = source
        self._idle: queue.LifoQueue[RenderProcess] = queue.LifoQueue()
        self._all: set[RenderProcess] = set()
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(MAX_PROCESSES, "render")
        # Also at the interpreter's exit.
        self.close = weakref.finalize(self, _close, self._all, self._threads)
        self._idle.put(self._start())

    def compiled(self) -> dict[str, Any]:
        """Return what RenderProcess.compiled returns. Raises ConfinedError."""
        with self._process() as process:
            return process.compiled()

    def render(self, context: dict[str, Any]) -> dict[str, str]:
        """Return what RenderProcess.render returns. Raises TemplateLimitError."""
        try:
            with self._process() as process:
                return process.render(context)
        except ConfinedError as error:
            raise TemplateLimitError(f"The chat template {error} for these messages.") from error

    async def in_thread(self, work: Callable[[], str]) -> str:
        """Run `work`, which calls `render`, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    @contextlib.contextmanager
    def _process(self) -> Iterator[RenderProcess]:
        """Lend an idle process. Replace it if it ends."""
        process = self._take()
        try:
            yield process
        except ConfinedError:
            process = self._replace(process)
            raise
        finally:
            self._idle.put(process)

    def _take(self) -> RenderProcess:
        with contextlib.suppress(queue.Empty):
            process = self._idle.get_nowait()
            return process if process.is_running else self._replace(process)
        with self._lock:
            if len(self._all) < MAX_PROCESSES:
                return self._start()
        return self._idle.get()

    def _start(self) -> RenderProcess:
        process = RenderProcess(self._source)
        self._all.add(process)
        return process

    def _replace(self, process: RenderProcess) -> RenderProcess:
        process.close()
        with self._lock:
            self._all.discard(process)
            return self._start()


def _close(processes: set[RenderProcess], threads: ThreadPoolExecutor) -> None:
    """Kill the processes; a call that waits for one then fails."""
    for process in list(processes):
        process.close()
    threads.shutdown(wait=False)
