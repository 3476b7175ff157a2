"""The client of a model's server: heads, chunks, and connections that break off."""

from __future__ import annotations

import pytest

from server.models.upstream import Chunks, parse_head

WHOLE = b"5\r\nhello\r\n6;x=1\r\n world\r\n0\r\n\r\n"


@pytest.mark.parametrize("is_raw", [False, True])
@pytest.mark.parametrize("size", [1, 2, 3, 7, 100])
def test_chunks_cut_anywhere_come_out_whole(size: int, is_raw: bool) -> None:
    chunks = Chunks()
    chunks.is_raw = is_raw
    parts = [chunks.feed(WHOLE[at : at + size]) for at in range(0, len(WHOLE), size)]
    expected = WHOLE.removesuffix(b"0\r\n\r\n") if is_raw else b"hello world"
    assert b"".join(parts) == expected
    assert chunks.is_complete


def test_chunk_that_breaks_off_does_not_come_out() -> None:
    chunks = Chunks()
    assert chunks.feed(b"5\r\nhello\r\n6\r\n wor") == b"hello"
    assert not chunks.is_complete


def test_head_has_the_headers_of_the_answer_only() -> None:
    head = parse_head(
        b"HTTP/1.1 429 Too Many\r\nDate: now\r\nX-A: 1\r\nx-a:2\r\nContent-Length: 7\r\n"
        b"Connection: close"
    )
    assert (head.status, head.length, head.is_closing) == (429, 7, True)
    assert head.headers == [(b"x-a", b"1"), (b"x-a", b"2"), (b"content-length", b"7")]


def test_head_of_a_stream_has_no_length() -> None:
    head = parse_head(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked")
    assert head.length is None
    assert head.headers == []
