"""OutputStream: outputs arrive once, and the stream ends correctly."""

from __future__ import annotations

import asyncio

import pytest

from engine.errors import RequestRejectedError
from engine.protocol.outputs import PrefillChunk, Rejected
from tests.support.client_rig import Client, read, token


async def test_stream_slow_reader_gets_all_outputs_in_one_batch(client: Client) -> None:
    stream, (a, b) = client.submit_prompts(1, 1)
    batches = aiter(stream)
    client.step(token(a, 1), token(b, 2), admitted=(a, b), at=1.0)
    client.step(token(a, 3), at=2.0)
    assert [(at, o.token) for at, o in await anext(batches)] == [(1.0, 1), (1.0, 2), (2.0, 3)]
    assert stream.admissions.keys() == {a, b}
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    assert not waiting.done()
    client.step(token(a, 4, "length"))
    assert [o.token for _, o in await waiting] == [4]
    client.step(token(b, 5, "stop"))
    assert await read(stream) == [[5]]
    assert not client.busy
    assert client.endpoint.aborted == []


async def test_stream_cancelled_reader_loses_no_output(client: Client) -> None:
    stream, (request_id,) = client.submit_prompts(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(aiter(stream))
    client.step(token(request_id, 1), token(request_id, 2, "stop"))
    assert await read(stream) == [[1, 2]]


async def test_finish_one_request_leaves_the_others(client: Client) -> None:
    stream, (a, b) = client.submit_prompts(1, 1)
    client.step(token(a, 1), token(b, 2))
    stream.finish(a)
    stream.finish(a)
    assert client.endpoint.aborted == [[a]]
    client.step(token(a, 9), token(b, 3, "stop"))  # sampled before the engine received the abort
    assert await read(stream) == [[1, 2, 3]]
    stream.finish(b)
    stream.close()
    assert client.endpoint.aborted == [[a]], "no request is left to abort"


async def test_finish_last_request_ends_a_waiting_reader(client: Client) -> None:
    stream, (request_id,) = client.submit_prompts(1)
    reader = asyncio.ensure_future(read(stream))
    await asyncio.sleep(0)
    stream.finish(request_id)
    assert await reader == []


async def test_close_aborts_unfinished_requests_once(client: Client) -> None:
    stream, (a, b, c) = client.submit_prompts(1, 1, 1)
    client.step(token(b, 1, "stop"))
    stream.close()
    stream.close()
    stream.finish(a)
    assert client.endpoint.aborted == [[a, c]]
    assert not client.busy
    client.step(token(a, 9, "length"), token(c, 9))  # has no reader; must not fail


async def test_stream_rejected_request_fails_only_its_submission(client: Client) -> None:
    stream, (a, b) = client.submit_prompts(1, 1)
    bystander, (other,) = client.submit_prompts(1)
    client.step(token(a, 1))
    client._on_message(Rejected(b, "context_length_exceeded", "too long"))
    batches = aiter(stream)
    assert [o.token for _, o in await anext(batches)] == [1], "earlier outputs are delivered"
    with pytest.raises(RequestRejectedError, match="too long") as refused:
        await anext(batches)
    assert refused.value.code == "context_length_exceeded"
    stream.close()
    assert a in client.endpoint.aborted[0]
    client.step(token(other, 7, "stop"))
    assert await read(bystander) == [[7]]


@pytest.mark.parametrize("wakes", [False, True])
async def test_stream_wakes_on_prefills_on_request(client: Client, wakes: bool) -> None:
    stream, (request_id,) = client.submit_prompts(1)
    stream.wakes_on_prefills = wakes
    batches = aiter(stream)
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    stream.add_prefill(1.0, 2.0, PrefillChunk(request_id, 0, 64))
    await asyncio.sleep(0.01)
    assert waiting.done() is wakes
    assert len(stream.prefills[request_id]) == 1
    if wakes:
        assert await waiting == []
        waiting = asyncio.ensure_future(anext(batches))
        await asyncio.sleep(0)
        assert not waiting.done()
    client.step(token(request_id, 4, "stop"))
    assert [o.token for _, o in await waiting] == [4]
