"""Run the lines of a batch: the one path for `/v1/batches` and `penstock run-batch`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgspec

from server.batch.lines import BatchLine
from server.batch.results import Results, result_line
from server.batch.slots import LineSlots
from server.sender import Reply, Sender


async def run_lines(
    lines: Iterator[BatchLine],
    results: Results,
    sender: Sender,
    slots: asyncio.Semaphore | LineSlots,
) -> None:
    """Send all lines and append their results.

    Each open line takes one of the `slots`, which several batches may share. Raises ServerAway,
    OSError or what the results raise; the other open lines then stay without a result.
    """
    try:
        async with asyncio.TaskGroup() as group:
            while True:
                await slots.acquire()
                line = None
                try:
                    line = await asyncio.to_thread(next, lines, None)
                finally:
                    if line is None:
                        slots.release()
                if line is None:
                    break
                task = group.create_task(_run_line(line, results, sender))
                task.add_done_callback(lambda _: slots.release())
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _run_line(line: BatchLine, results: Results, sender: Sender) -> None:
    reply = await sender.send(line.url, bytes(line.body))
    await results.add(line.custom_id, _result(line, reply), failed=reply.failed)


def _result(line: BatchLine, reply: Reply) -> bytes:
    if reply.body is None:
        message = f"The server answered with status {reply.status} and a body that is not JSON."
        return result_line(line.custom_id, None, {"code": "invalid_response", "message": message})
    response = {
        "status_code": reply.status,
        "request_id": reply.request_id,
        "body": msgspec.Raw(reply.body),
    }
    return result_line(line.custom_id, response, None)


async def refuse_lines(
    lines: Iterator[BatchLine], results: Results, code: str, message: str
) -> None:
    """Append this error as the result of all lines. Raises like `run_lines`."""
    while (line := await asyncio.to_thread(next, lines, None)) is not None:
        error = {"code": code, "message": message}
        await results.add(line.custom_id, result_line(line.custom_id, None, error), failed=True)
