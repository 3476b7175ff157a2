"""The shapes of HTTP requests: two lengths, absolute targets."""

from __future__ import annotations

import asyncio
import json

import pytest

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
        ("http://localhost", "localhost", 200),
        ("http:///v1/models", "localhost", 404),
        ("ftp://localhost/v1/models", "localhost", 404),
        ("http://localhost/%2e%2e/x", "localhost", 404),
    ],
)
async def test_absolute_target_is_served_as_its_path(served, target, host, status):
    request = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
    answer = await exchange(served, request.encode())
    assert int(answer.split(b" ", 2)[1]) == status, answer


async def test_absolute_target_needs_the_key(model, says):
    async with serving(FakeEngine(says("x")), model, api_key=("secret",)) as served:
        for line, status in (("", 401), ("Authorization: Bearer secret\r\n", 200)):
            request = (
                f"GET http://localhost/v1/models HTTP/1.1\r\nHost: x\r\n{line}"
                "Connection: close\r\n\r\n"
            )
            answer = await exchange(served, request.encode())
            assert int(answer.split(b" ", 2)[1]) == status
