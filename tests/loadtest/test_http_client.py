"""One request and its response, with any division of the received bytes."""

from __future__ import annotations

import asyncio
import json

import pytest

from loadtest.errors import BenchError
from loadtest.http_client import Exchange, Target, exchange, stream
from tests.support.scripted import ROLE, event, scripted, text

TARGET = Target.parse("http://localhost:8000")
USAGE = event({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 5}})
STREAM = (b": ping\n\n", event(ROLE), text(), text("\u00e9\n"), USAGE, b"data: [DONE]\n\n")


def answer(*parts: bytes, status: bytes = b"200 OK", end: bool = True) -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)
    head = b"HTTP/1.1 %s\r\nContent-Type: text/event-stream; charset=utf-8\r\n" % status
    return head + b"Transfer-Encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n" * end


def received(data: bytes, size: int) -> Exchange:
    this = Exchange(TARGET, "/v1/completions", {"prompt": "x"})
    this.request()
    for first in range(0, len(data), size):
        this.receive(data[first : first + size])
    if not this.done:
        this.receive(b"")
    return this


@pytest.mark.parametrize("size", [1, 7, 64, 10**6])
def test_exchange_with_any_division_of_bytes_finds_same_events(size: int) -> None:
    done = received(answer(*STREAM), size).completion()
    assert (done.error, done.status, done.tokens, done.prompt_tokens) == ("", 200, 5, 7)
    assert len(done.arrivals) == 2  # the role, the comment and the usage event carry no text


def test_exchange_with_all_events_in_one_chunk_finds_them() -> None:
    assert len(received(answer(b"".join(STREAM)), 10**6).completion().arrivals) == 2


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (answer(*STREAM[:3], end=False), "cut off", "without sending complete message body"),
        (answer(*STREAM[:4]), "cut off", "without [DONE]"),
        (answer(text(), event({"error": {"message": "It died."}})), "cut off", "It died."),
        (answer(b"data: {\n\n", b"data: [DONE]\n\n"), "cut off", "does not match OpenAI's API"),
        (b"", "cut off", "the connection was closed before a response arrived"),
        (b"HTTP/1.1 200", "cut off", "the connection was closed before a response arrived"),
        (b"220 smtp ready\r\n\r\n", "not HTTP", "illegal status line"),
        (
            b'HTTP/1.1 429 x\r\ncontent-length: 32\r\n\r\n{"error": {"message": "Too many"}}',
            "rejected",
            "",
        ),
    ],
)
def test_exchange_with_incomplete_response_reports_why(data: bytes, error: str, words: str) -> None:
    done = received(data, 10**6).completion()
    assert done.error == error
    assert words in done.message


def test_exchange_request_has_path_prefix_key_and_body() -> None:
    target = Target.parse("https://host/api/v1", "secret")
    assert (target.host, target.port, target.tls) == ("host", 443, True)
    head, body = Exchange(target, "/v1/x", {"a": 1}).request().split(b"\r\n\r\n")
    assert head.startswith(b"POST /api/v1/x HTTP/1.1\r\n")
    assert b"Bearer secret" in head
    assert json.loads(body) == {"a": 1}


def test_exchange_request_to_ipv6_address_has_host_in_brackets() -> None:
    request = Exchange(Target.parse("http://[::1]:8000"), "/v1/models", None).request()
    assert b"Host: [::1]:8000\r\n" in request


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_target_of_invalid_url_raises_bench_error(url: str) -> None:
    with pytest.raises(BenchError):
        Target.parse(url)


async def test_stream_measures_the_delays_of_the_server() -> None:
    async with scripted(first_s=0.2, gap_s=0.05) as server:
        body = {"max_tokens": 4, "messages": [{"content": "a b"}]}
        done = await stream(Target.parse(server.url), "/v1/chat/completions", body)
    assert done.error == ""
    assert done.arrivals[0] - done.started >= 0.2
    assert len(done.gaps) == 3
    assert min(done.gaps) >= 0.04
    assert (done.prompt_tokens, done.tokens) == (14, 4)


async def test_stream_from_silent_server_times_out() -> None:
    async with scripted(first_s=60) as server:
        body = {"max_tokens": 4, "messages": [{"content": "a b"}]}
        done = await stream(Target.parse(server.url), "/v1/chat/completions", body, limit_s=0.2)
    assert (done.error, done.message) == ("timeout", "incomplete after 0.2 s")


async def test_exchange_with_closed_port_reports_no_connection() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    this = await exchange(Target.parse(f"127.0.0.1:{port}"), "/v1/models", None, 5)
    assert (this.error, this.status) == ("no connection", 0)


def test_target_of_non_ascii_url_is_encoded() -> None:
    target = Target.parse("http://b\u00fccher.example/a b/\u00e9%20\udcff/v1")
    assert (target.host, target.prefix) == ("xn--bcher-kva.example", "/a%20b/%C3%A9%20%FF")
    assert (
        b"GET /a%20b/%C3%A9%20%FF/v1/models HTTP/1.1"
        in Exchange(target, "/v1/models", None).request()
    )
