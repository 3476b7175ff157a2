"""The shapes of HTTP requests: limits of heads, two lengths, absolute targets."""

from __future__ import annotations

import asyncio
import json

import pytest

from server.http.framing import MAX_CHUNKS, MAX_HEAD_BYTES
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, has_exception, serving


async def exchange(served: Served, request: bytes) -> bytes:
    """Send bytes and read until the server closes the connection."""
    reader, writer = await asyncio.open_connection(*served.address)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(-1), 10)
    finally:
        writer.close()


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize("key", [(), ("secret",)], ids=["open", "locked"])
async def test_request_with_two_lengths_is_refused_and_closed(model, says, method, key):
    """A proxy that goes by Content-Length would take the second request for a part of the body."""
    first = (
        f"{method} /v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    )
    second = "GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    async with serving(FakeEngine(says("x")), model, api_key=key) as served:
        answer = await exchange(served, (first + second).encode())
    assert answer.count(b"HTTP/1.1 ") == 1
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in head.lower()
    if method != "HEAD":
        assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    "lines",
    [
        "GET /v1/models HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked",
        "POST /v1/models HTTP/1.1\r\nTransfer-Encoding: chunked",
        "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
        "Transfer-Encoding: chunked",
        "HEAD /version HTTP/1.1\r\nTransfer-Encoding: chunked",
        "POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n"
        "Expect: 100-continue\r\nTransfer-Encoding: chunked",
    ],
    ids=["two lengths", "no such route", "body is read", "no body in the answer", "100-continue"],
)
async def test_head_with_malformed_chunk_in_one_packet_is_answered_once(served, lines, caplog):
    """The connection answers before the route runs, so the route must find the client gone."""
    request = f"{lines}\r\nHost: localhost\r\n\r\nnot a length\r\n"
    answer = await exchange(served, request.encode())
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert not [record for record in caplog.records if has_exception(record)], caplog.text


async def test_malformed_head_after_a_head_request_is_answered_with_a_body(served):
    head = "HEAD /version HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = await exchange(served, f"{head}GET / HTTP/1.1\r\nHost\r\n\r\n".encode())
    first, second, body = answer.split(b"\r\n\r\n")
    assert first.startswith(b"HTTP/1.1 200 ")
    assert second.startswith(b"HTTP/1.1 400 ")
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost/health", "localhost", 200),
        ("HTTP://localhost:1/v1/models?x=1", "evil.example", 200),
        ("https://127.0.0.1/v1/models", "localhost", 200),
        ("http://evil.example/v1/models", "localhost", 400),  # its own host counts
        ("http:///v1/models", "localhost", 404),
        ("ftp://localhost/v1/models", "localhost", 404),
        ("http://localhost/%2e%2e/x", "localhost", 404),
    ],
)
async def test_absolute_target_is_served_as_its_path(served, target, host, status):
    request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    answer = await exchange(served, request.encode())
    assert int(answer.split(b" ", 2)[1]) == status, answer


async def test_absolute_target_without_a_path_is_served_as_the_root(served):
    statuses = []
    for target in ("http://localhost", "/"):
        request = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        statuses.append((await exchange(served, request.encode())).split(b" ", 2)[1])
    assert statuses[0] == statuses[1]


async def test_absolute_target_needs_the_key(model, says):
    async with serving(FakeEngine(says("x")), model, api_key=("secret",)) as served:
        for line, status in (("", 401), ("Authorization: Bearer secret\r\n", 200)):
            request = (
                f"GET http://localhost/v1/models HTTP/1.1\r\nHost: x\r\n{line}"
                "Connection: close\r\n\r\n"
            )
            answer = await exchange(served, request.encode())
            assert int(answer.split(b" ", 2)[1]) == status


GET = b"GET /version HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
)
BODY = b'{"prompt": "x", "max_tokens": 1}'
CHUNK = b"%x\r\n%s\r\n" % (len(BODY), BODY)
CHUNK_OF_EXTENSION = b"1;x=%s\r\n \r\n" % (b"e" * 30_000)


def headers_of(size: int) -> bytes:
    """Return a whole head of `size` bytes."""
    head = GET + b"Connection: close\r\nX: "
    return head + b"x" * (size - len(head) - 4) + b"\r\n\r\n"


async def exchange_in_parts(served: Served, request: bytes, size: int) -> bytes:
    """Send a request in reads of at most `size` bytes, and read until the server closes."""
    reader, writer = await asyncio.open_connection(*served.address)
    for begin in range(0, len(request), size):
        writer.write(request[begin : begin + size])
        await writer.drain()
        await asyncio.sleep(0)
    try:
        return await asyncio.wait_for(reader.read(-1), 10)
    finally:
        writer.close()


@pytest.mark.parametrize("part", [1 << 20, 65536, 5000])
@pytest.mark.parametrize(
    "request_bytes",
    [
        headers_of(MAX_HEAD_BYTES + 1),
        headers_of(200_000),
        GET + b"X: y\r\n" * 20_000 + b"\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET /version?" + b"x" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        GET + b"Bad Name: " + b"x" * 100_000 + b"\r\n\r\n",
        CHUNKED + CHUNK + b"0\r\n" + b"X: y\r\n" * 20_000 + b"\r\n",
        CHUNKED + CHUNK + b"0\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        CHUNKED + b"1;" + b"x" * 100_000 + b"\r\n \r\n" + CHUNK + b"0\r\n\r\n",
        CHUNKED + CHUNK_OF_EXTENSION * 3 + CHUNK + b"0\r\n\r\n",
        CHUNKED + CHUNK + b"0;" + b"x" * 40_000 + b"\r\nX: " + b"y" * 40_000 + b"\r\n\r\n",
    ],
    ids=[
        *("a byte too long", "long header", "many headers", "long path", "long query"),
        *("illegal header", "many trailers", "long trailer", "long extension", "many extensions"),
        "extension and trailer",
    ],
)
async def test_head_above_the_limit_is_refused_in_any_packets(served, request_bytes, part, caplog):
    answer = await exchange_in_parts(served, request_bytes, part)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 431 "), head
    assert answer.count(b"HTTP/1.1 ") == 1
    assert json.loads(body)["error"]["code"] == "headers_too_large"
    assert not [record for record in caplog.records if has_exception(record)], caplog.text
    assert (await served.complete()).status_code == 200


@pytest.mark.parametrize("part", [1 << 20, 5000])
@pytest.mark.parametrize(
    "request_bytes",
    [
        headers_of(MAX_HEAD_BYTES),
        CHUNKED + b"1\r\n \r\n" * 40_000 + CHUNK + b"0\r\n\r\n",
        CHUNKED + CHUNK_OF_EXTENSION * 2 + CHUNK + b"0\r\nX: y\r\n\r\n",
    ],
    ids=["head", "small chunks", "extensions"],
)
async def test_head_at_the_limit_is_served_in_any_packets(served, request_bytes, part):
    answer = await exchange_in_parts(served, request_bytes, part)
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]


@pytest.mark.variants(1)
@pytest.mark.parametrize("part", [1 << 20, 5000])
async def test_body_of_too_many_small_chunks_is_refused(served, part):
    """Each chunk takes the event loop microseconds, however small it is."""
    few = CHUNKED + b"1\r\n \r\n" * (MAX_CHUNKS + 2000)
    answer = await exchange_in_parts(served, few + CHUNK + b"0\r\n\r\n", part)
    assert answer.startswith(b"HTTP/1.1 400 "), answer[:300]
    assert b"too many small chunks" in answer
    large = b"%x\r\n%s\r\n" % (4096, b" " * 4096)  # each pays for 64 more
    answer = await exchange_in_parts(served, few + large * 40 + CHUNK + b"0\r\n\r\n", part)
    assert answer.startswith(b"HTTP/1.1 400 "), "the chunks before do not count"
    before = CHUNKED + large * 40 + b"1\r\n \r\n" * (MAX_CHUNKS + 2000)
    answer = await exchange_in_parts(served, before + CHUNK + b"0\r\n\r\n", part)
    assert answer.startswith(b"HTTP/1.1 200 "), answer[:300]


async def test_long_head_behind_another_request_is_refused(served):
    answer = await exchange(served, GET + b"\r\n" + headers_of(100_000))
    first, second = answer.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200 ")
    assert second.startswith(b"431 ")


async def test_error_quotes_little_of_an_illegal_line(served):
    answer = await exchange(served, GET + b"Bad Name: " + b"x" * 50_000 + b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert len(answer) < 2000
