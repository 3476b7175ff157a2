"""OutputStream: the buffer between the engine's messages and the reader of one submission."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Generic, TypeVar

from engine.protocol.embed import EmbedOutput
from engine.protocol.generate import Explained
from engine.protocol.outputs import Admission, PrefillChunk, TokenOutput

Output = TypeVar("Output", TokenOutput, EmbedOutput)


class OutputStream(Generic[Output]):
    """Merged outputs of the requests of one submission, buffered between engine and reader.

    A slow reader costs one list: it gets all outputs since its last read as one batch. Iteration
    ends when every request has finished. It raises EngineDeadError if the engine dies and
    RequestRejectedError if the engine refuses a request.
    """

    def __init__(self, ids: Sequence[int], abort: Callable[[list[int]], None]) -> None:
        self.explained: dict[int, Explained] | None = None  # by index in the answer
        self.admissions: dict[int, Admission] = {}
        # By request id: (begin of the step, end of the step, prefill).
        self.prefills: defaultdict[int, list[tuple[float, float, PrefillChunk]]] = defaultdict(list)
        self.wakes_on_prefills = False  # set it to read empty batches when only these have grown
        self._has_prefills = False
        self._unfinished = set(ids)
        self._pending: list[tuple[float, Output]] = []
        self._error: Exception | None = None
        # An asyncio.Event would take twice as long per token.
        self._waiter: asyncio.Future[None] | None = None
        self._abort = abort

    def deliver(self, at: float, output: Output) -> None:
        self._pending.append((at, output))
        if output.finish is not None:
            self._unfinished.discard(output.id)
        self._wake()

    def add_prefill(self, begin: float, end: float, prefill: PrefillChunk) -> None:
        self.prefills[prefill.id].append((begin, end, prefill))
        if self.wakes_on_prefills:
            self._has_prefills = True
            self._wake()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def _wait(self) -> None:
        """Wait for the next `_wake`. There is one reader."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    async def arrival(self) -> None:
        """Wait until there is something to read. If it is only an error, raise it."""
        if not self._pending and self._error is None and self._unfinished:
            await self._wait()
        if self._error is not None and not self._pending:
            raise self._error

    async def __aiter__(self) -> AsyncIterator[list[tuple[float, Output]]]:
        """Yield batches of (time at which the step ended, output)."""
        while True:
            if self._pending:
                batch, self._pending = self._pending, []
                self._has_prefills = False
                yield batch
            elif self._has_prefills:
                self._has_prefills = False
                yield []
            elif self._error is not None:
                raise self._error
            elif not self._unfinished:
                return
            else:
                await self._wait()

    def finish(self, request_id: int) -> None:
        """Abort a request that the reader needs no more of, as when a stop string was found."""
        if request_id in self._unfinished:
            self._unfinished.discard(request_id)
            self._abort([request_id])
            self._wake()

    def close(self) -> None:
        """Abort all unfinished requests. Idempotent; call it in the reader's `finally`."""
        if self._unfinished:
            self._abort(sorted(self._unfinished))
            self._unfinished.clear()
