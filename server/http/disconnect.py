"""Cancel the work of a request when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from server.http.errors import ClientGone

Result = TypeVar("Result")


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`. Cancels it and raises ClientGone if the client disconnects.

    Without this, Starlette would let the work run to its end. The body of the request must have
    been read, because other messages of `receive` are dropped.
    """
    task = asyncio.create_task(work)
    gone = asyncio.create_task(_disconnect(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    message = await receive()
    while message["type"] != "http.disconnect":
        message = await receive()
