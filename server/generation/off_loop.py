"""Run long work in a thread, so that the event loop keeps serving the streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

INLINE_CHARS = 8192  # shorter texts take less time than a thread takes to start
Result = TypeVar("Result")


async def off_loop(chars: int, work: Callable[[], Result]) -> Result:
    """Return `work()`, which takes as long as tokenising a text of `chars` characters.

    Work on long texts runs in a thread. The tokenizer releases the GIL.
    """
    if chars < INLINE_CHARS:
        return work()
    return await asyncio.to_thread(work)
