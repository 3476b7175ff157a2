"""One request and its answer, however the bytes are cut."""

from __future__ import annotations

import asyncio
import json

import pytest

from loadtest.errors import BenchError
from loadtest.http_client import Exchange, Target, exchange, stream
from tests.loadtest.scripted import ROLE, event, scripted, text

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
def test_however_the_bytes_are_cut_the_events_are_the_same(size: int) -> None:
    done = received(answer(*STREAM), size).completion()
    assert (done.error, done.status, done.tokens, done.prompt_tokens) == ("", 200, 5, 7)
    assert len(done.arrivals) == 2  # neither the role, nor the comment, nor the usage is text


def test_one_chunk_may_hold_all_events() -> None:
    assert len(received(answer(b"".join(STREAM)), 10**6).completion().arrivals) == 2


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (answer(*STREAM[:3], end=False), "cut off", "without sending complete message body"),
        (answer(*STREAM[:4]), "cut off", "without [DONE]"),
        (answer(text(), event({"error": {"message": "It died."}})), "cut off", "It died."),
        (answer(b"data: {\n\n", b"data: [DONE]\n\n"), "cut off", "not what OpenAI's API sends"),
        (b"", "cut off", "the connection was closed before an answer came"),
        (b"HTTP/1.1 200", "cut off", "the connection was closed before an answer came"),
        (b"220 smtp ready\r\n\r\n", "not HTTP", "illegal status line"),
        (
            b'HTTP/1.1 429 x\r\ncontent-length: 32\r\n\r\n{"error": {"message": "Too many"}}',
            "rejected",
            "",
        ),
    ],
)
def test_what_is_not_whole_says_why(data: bytes, error: str, words: str) -> None:
    done = received(data, 10**6).completion()
    assert done.error == error
    assert words in done.message


def test_the_request_carries_prefix_key_and_length() -> None:
    target = Target.parse("https://host/api/v1", "secret")
    assert (target.host, target.port, target.tls) == ("host", 443, True)
    head, body = Exchange(target, "/v1/x", {"a": 1}).request().split(b"\r\n\r\n")
    assert head.startswith(b"POST /api/v1/x HTTP/1.1\r\n")
    assert b"Bearer secret" in head
    assert json.loads(body) == {"a": 1}


def test_an_address_with_colons_is_a_host_in_brackets() -> None:
    request = Exchange(Target.parse("http://[::1]:8000"), "/v1/models", None).request()
    assert b"Host: [::1]:8000\r\n" in request


@pytest.mark.parametrize("url", ["ftp://host", "http://", "http://host:port"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BenchError):
        Target.parse(url)


async def test_times_are_the_servers() -> None:
    async with scripted(first_s=0.2, gap_s=0.05) as server:
        body = {"max_tokens": 4, "messages": [{"content": "a b"}]}
        done = await stream(Target.parse(server.url), "/v1/chat/completions", body)
    assert done.error == ""
    assert done.arrivals[0] - done.started >= 0.2
    assert len(done.gaps) == 3
    assert min(done.gaps) >= 0.04
    assert (done.prompt_tokens, done.tokens) == (14, 4)


async def test_a_silent_server_ends_in_a_timeout() -> None:
    async with scripted(first_s=60) as server:
        body = {"max_tokens": 4, "messages": [{"content": "a b"}]}
        done = await stream(Target.parse(server.url), "/v1/chat/completions", body, limit_s=0.2)
    assert (done.error, done.message) == ("timeout", "not whole after 0.2 s")


async def test_nobody_there() -> None:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    this = await exchange(Target.parse(f"127.0.0.1:{port}"), "/v1/models", None, 5)
    assert (this.error, this.status) == ("no connection", 0)


def test_a_target_is_what_a_request_can_carry() -> None:
    target = Target.parse("http://b\u00fccher.example/a b/\u00e9%20\udcff/v1")
    assert (target.host, target.prefix) == ("xn--bcher-kva.example", "/a%20b/%C3%A9%20%FF")
    assert (
        b"GET /a%20b/%C3%A9%20%FF/v1/models HTTP/1.1"
        in Exchange(target, "/v1/models", None).request()
    )
