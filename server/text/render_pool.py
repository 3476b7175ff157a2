"""RenderPool: the processes that render one chat template."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from engine.client.module_command import python_module
from server.confined.pool import ConfinedPool
from server.confined.process import ConfinedError, ConfinedProcess, Limits
from server.text import exact_json
from server.text.chat_template import TemplateLimitError

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
        self._pool = ConfinedPool(partial(RenderProcess, source), MAX_PROCESSES, "render")
        self._pool.start_one()

    def compiled(self) -> dict[str, Any]:
        """Return what RenderProcess.compiled returns. Raises ConfinedError."""
        with self._pool.lend() as process:
            return process.compiled()

    def render(self, context: dict[str, Any]) -> dict[str, str]:
        """Return what RenderProcess.render returns. Raises TemplateLimitError."""
        try:
            with self._pool.lend() as process:
                return process.render(context)
        except ConfinedError as error:
            raise TemplateLimitError(f"The chat template {error} for these messages.") from error

    async def in_thread(self, work: Callable[[], str]) -> str:
        """Run `work`, which calls `render`, in a thread."""
        return await self._pool.in_thread(work)

    def close(self) -> None:
        """Kill the processes. Idempotent."""
        self._pool.close()
