"""cancel_on_disconnect: the work ends with its client, and nothing is left behind."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from server.http.disconnect import cancel_on_disconnect
from server.http.errors import ClientGone


class Client:
    """The `receive` of a client that disconnects once `gone` is set."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.messages: list[Message] = [{"type": "http.request"}]

    async def receive(self) -> Message:
        if self.messages:
            return self.messages.pop()
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def test_work_of_staying_client_returns_its_result() -> None:
    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    tasks = asyncio.all_tasks()
    assert await cancel_on_disconnect(Client().receive, work()) == 7
    assert asyncio.all_tasks() == tasks


async def test_work_that_fails_raises_its_error() -> None:
    async def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await cancel_on_disconnect(Client().receive, work())


@pytest.mark.parametrize("cancelled", [False, True])
async def test_work_is_cancelled_with_its_client_or_its_task(cancelled: bool) -> None:
    client, ended = Client(), []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    tasks = asyncio.all_tasks()
    running = asyncio.create_task(cancel_on_disconnect(client.receive, work()))
    await asyncio.sleep(0.01)
    if cancelled:
        running.cancel()
    else:
        client.gone.set()
    with pytest.raises(asyncio.CancelledError if cancelled else ClientGone):
        await running
    assert ended == [True]
    assert asyncio.all_tasks() == tasks
