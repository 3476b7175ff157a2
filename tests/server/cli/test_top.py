"""`penstock top` against servers that end, say little, or are other programs."""

from __future__ import annotations

import io
from typing import Any

import httpx2
import orjson
import pytest
from rich.console import Console

from server.cli.api_client import ApiClient, ClientError
from server.cli.top import show

STATS = {
    "running": 1,
    "waiting": 0,
    "held": 3,
    "cached": 0,
    "total": 64,
    "preemptions": 0,
    "prefix_queries": 0,
    "prefix_hits": 0,
    "generated": 7,
}
QUEUE = {"requests": [], "first": None, "reason": None}
FRAME = {"t": 1_000_000, "requests": [], "queue": QUEUE, "stats": STATS, "role": "admin"}


def event(name: str, frame: Any) -> str:
    return f"event: {name}\ndata: {orjson.dumps(frame).decode()}\n\n"


def shown(*events: str, greeting: Any = None, once: bool = False) -> str:
    """Return what `top` prints of a server that sends these events."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        if request.url.path == "/ui/api/hello":
            return httpx2.Response(200, content=greeting or b'{"model": {"id": "demo"}}')
        return httpx2.Response(200, text="".join(events))

    client = ApiClient("http://127.0.0.1:1", "")
    client.http = httpx2.Client(base_url=client.url, transport=httpx2.MockTransport(answer))
    written = io.StringIO()
    console = Console(file=written, width=100)
    try:
        show(client, console, once=once)
    finally:
        client.close()
    return written.getvalue()


def test_server_that_ends_before_the_first_picture_is_an_error() -> None:
    for once in (False, True):
        with pytest.raises(ClientError, match="ended the view"):
            shown(event("end", {"reason": "dead"}), once=once)


def test_end_after_a_picture_is_an_error_unless_one_was_wanted() -> None:
    events = event("hello", FRAME), event("end", {"reason": "draining"})
    assert "running 1" in shown(*events, once=True)
    with pytest.raises(ClientError, match="ended the view"):
        shown(*events)


def test_other_events_and_comments_are_skipped() -> None:
    noise = ": ping\n\n", event("error", {"error": {"message": "x"}}), event("new", {})
    frame = event("frame", {**FRAME, "t": 3_000_000, "stats": {**STATS, "generated": 27}})
    assert "10 tok/s" in shown(event("hello", FRAME), *noise, frame, once=True)


@pytest.mark.parametrize("greeting", [b"<html>", b"[]", b'"x"'], ids=str)
def test_another_program_is_an_error(greeting: bytes) -> None:
    with pytest.raises(ClientError, match="no route of a Penstock server"):
        shown(greeting=greeting)
