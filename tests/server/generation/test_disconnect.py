"""Clients that disconnect, stall, wait or send odd request ids; other requests are unaffected."""

from __future__ import annotations

import asyncio
import json
import socket
import time

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, eventually, serving


def request(**fields) -> bytes:
    body = json.dumps({"prompt": "x", "max_tokens": 400, **fields}).encode()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n{head}\r\n".encode() + body


async def connect(served: Served, **fields) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection(*served.address)
    writer.write(request(**fields))
    await writer.drain()
    return reader, writer


@pytest.fixture
async def slow(model, encode):
    async with serving(FakeEngine(lambda r: encode("a"), delay=0.01), model) as served:
        yield served


async def test_client_disconnect_aborts_all_choices(slow):
    engine = slow.engine
    _, writer = await connect(slow, n=2)
    await eventually(lambda: engine.stats.step > 3, "tokens come")
    writer.transport.abort()
    await eventually(lambda: sorted(engine.aborted) == [1, 2], "both are aborted")
    assert not engine.running
    assert await slow.metric("aborts_total") == 1


async def test_client_disconnect_aborts_only_unfinished_choices(model, encode):
    def script(request):
        return [257] if request.params.seed == 1 else encode("a")

    async with serving(FakeEngine(script, delay=0.01), model) as served:
        _, writer = await connect(served, stream=True, n=2, seed=1)
        await eventually(lambda: served.engine.stats.step > 3, "tokens come")
        writer.close()
        await eventually(lambda: served.engine.aborted == [2], "the second is aborted")


async def stall(served: Served, **fields) -> socket.socket:
    """Send a request, and return the socket without reading from it."""
    loop, sock = asyncio.get_running_loop(), socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    await loop.sock_connect(sock, served.address)
    await loop.sock_sendall(sock, request(n=16, logprobs=5, **fields))
    await eventually(lambda: bool(served.engine.requests), "the request runs")
    return sock


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="needs TCP_USER_TIMEOUT")
@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_stops_reading_is_cut_off_at_send_timeout(model, encode, stream, caplog):
    engine = FakeEngine(lambda r: encode("a"), delay=0.01 if stream else 0.0)
    async with serving(engine, model, send_buffer=4096, send_timeout=1.0) as served:
        with await stall(served, stream=stream):
            await eventually(lambda: not engine.running, "the request is done or aborted")
            await eventually(lambda: not served.connections, "the connection is gone")
        aborts = await served.metric("aborts_total", reason="send_timeout")
        assert (aborts, len(engine.aborted)) == ((1, 16) if stream else (0, 0))
        assert await served.metric("aborts_total") == aborts
    assert "ASGI callable" not in caplog.text


async def test_stalled_stream_without_tcp_user_timeout_is_aborted(model, encode, monkeypatch):
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT", raising=False)
    monkeypatch.setattr("server.generation.sse.AFTER_KERNEL_S", 0)
    engine = FakeEngine(lambda r: encode("a"), delay=0.01)
    async with serving(engine, model, send_buffer=4096, send_timeout=0.3) as served:
        with await stall(served, stream=True):
            await eventually(lambda: len(engine.aborted) == 16, "all are aborted")
            assert await served.metric("aborts_total", reason="send_timeout") == 1


async def test_client_that_pauses_reads_whole_stream(model, encode, monkeypatch):
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT", raising=False)
    monkeypatch.setattr("server.generation.sse.AFTER_KERNEL_S", 0)
    engine = FakeEngine(lambda r: encode("a"))
    async with serving(engine, model, send_buffer=4096, send_timeout=20.0) as served:
        with await stall(served, stream=True, max_tokens=40) as sock:
            await eventually(lambda: not engine.running, "all is computed")
            await asyncio.sleep(0.3)
            answer, loop = b"", asyncio.get_running_loop()
            while b"[DONE]" not in answer:
                answer += (part := await asyncio.wait_for(loop.sock_recv(sock, 65536), 10))
                assert part, "cut off"
        assert await served.metric("aborts_total") == 0


@pytest.mark.slow
async def test_client_that_reads_slowly_reads_whole_stream(model, encode, monkeypatch):
    """The whole stream takes longer than the send timeout, but no single chunk does."""
    monkeypatch.delattr(socket, "TCP_USER_TIMEOUT", raising=False)
    monkeypatch.setattr("server.generation.sse.AFTER_KERNEL_S", 0)
    engine = FakeEngine(lambda r: encode("a"))
    async with serving(engine, model, send_buffer=4096, send_timeout=2.0) as served:
        with await stall(served, stream=True, prompt=["x"] * 4) as sock:
            answer, loop, began = bytearray(), asyncio.get_running_loop(), time.monotonic()
            while not answer.endswith(b"0\r\n\r\n"):
                answer += (part := await asyncio.wait_for(loop.sock_recv(sock, 65536), 10))
                assert part, "cut off"
                await asyncio.sleep(0.02)
        assert b"[DONE]" in answer[-64:]
        assert time.monotonic() - began > 2.5, "it was not slow"
        assert await served.metric("aborts_total") == 0


HALF_A_HEAD = b"GET /version HTTP/1.1\r\nHost: local"


@pytest.mark.parametrize("sent", [b"", HALF_A_HEAD, request(), request() + HALF_A_HEAD])
async def test_connection_without_request_is_closed_after_keep_alive(model, says, sent):
    async with serving(FakeEngine(says("x")), model, keep_alive=0.5) as served:
        reader, writer = await asyncio.open_connection(*served.address)
        writer.write(sent)
        await asyncio.wait_for(reader.read(-1), 10)
        await eventually(lambda: not served.connections, "the server has closed it")
        writer.close()


async def test_head_sent_byte_by_byte_is_closed_after_keep_alive(model, says):
    async with serving(FakeEngine(says("x")), model, keep_alive=0.5) as served:
        reader, writer = await asyncio.open_connection(*served.address)
        writer.write(request())
        await reader.readuntil(b"}]")
        writer.write(HALF_A_HEAD)

        async def drip() -> None:
            while True:
                writer.write(b"x")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        await eventually(lambda: not served.connections, "the server has closed it")
        dripping.cancel()
        writer.close()


async def test_connection_with_open_request_outlives_keep_alive(model, says):
    engine = FakeEngine(says("x"))
    engine.gate.clear()
    async with serving(engine, model, keep_alive=1.0) as served:
        reader, writer = await asyncio.open_connection(*served.address)
        whole = request()
        for part in (whole[:30], whole[30:-5], whole[-5:]):
            writer.write(part)
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.5)
        engine.gate.set()
        assert (await asyncio.wait_for(reader.read(-1), 10)).startswith(b"HTTP/1.1 200 ")
        writer.close()


async def test_invalid_request_id_is_replaced(served):
    response = await served.http.get("/v1/models", headers={"x-request-id": "client-7.a:b_c"})
    assert response.headers["x-request-id"] == "client-7.a:b_c"
    for bad in ("a b", "x" * 129, "\x1b[31m", "é", ""):
        headers = {"x-request-id": bad.encode("latin-1")}
        if bad == "\x1b[31m":
            continue  # h11 refuses it first
        response = await served.http.get("/v1/models", headers=headers)
        assert response.headers["x-request-id"].startswith("req_")


async def test_concurrent_requests_with_equal_ids_all_complete(slow):
    headers = {"x-request-id": "same"}
    body = {"prompt": "x", "max_tokens": 5}
    answers = await asyncio.gather(
        *(slow.http.post("/v1/completions", json=body, headers=headers) for _ in range(4))
    )
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["aaaaa"] * 4


def asking_first(length: int) -> bytes:
    """The head of a request with `Expect: 100-continue`."""
    head = f"content-type: application/json\r\ncontent-length: {length}\r\n"
    head += "host: localhost\r\nexpect: 100-continue\r\n"
    return f"POST /v1/completions HTTP/1.1\r\n{head}\r\n".encode()


async def test_expect_continue_gets_100_then_200(served):
    reader, writer = await asyncio.open_connection(*served.address)
    writer.write(asking_first(14))
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
    writer.write(b'{"prompt":"a"}')
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200 ")
    writer.close()


async def test_expect_continue_with_too_large_length_gets_413(served):
    reader, writer = await asyncio.open_connection(*served.address)
    writer.write(asking_first(10**9))
    answer = await asyncio.wait_for(reader.read(-1), 30)
    assert answer.startswith(b"HTTP/1.1 413 ")
    writer.close()


async def test_client_disconnect_inside_body_is_logged_as_499(served, caplog):
    _, writer = await asyncio.open_connection(*served.address)
    writer.write(request()[:-5])
    await writer.drain()
    await asyncio.sleep(0.05)
    writer.transport.abort()
    await eventually(lambda: "'status': 499" in caplog.text, "the request is logged")
    assert "Traceback" not in caplog.text
    assert not served.engine.requests
    assert await served.metric("rejects_total") == 0
