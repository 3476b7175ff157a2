"""Disk access in threads that does not outlive the task that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(
    work: Callable[[], Result], cancelled_with: Callable[[Result], None] = lambda result: None
) -> Result:
    """Like asyncio.to_thread, but a cancelled caller waits until the thread is done.

    A thread that outlives the stop of a server would write while the next one uses the
    same folder. `cancelled_with` gets a result that a cancelled caller cannot take.
    """
    task = asyncio.create_task(asyncio.to_thread(work))
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is None:
        return task.result()
    if task.exception() is None:
        cancelled_with(task.result())
    raise cancelled
