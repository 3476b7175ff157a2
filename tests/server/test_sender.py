"""The answers after which the sender repeats a request, reports it or gives up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx2
import pytest

from server import sender as module
from server.sender import Reply, Sender, ServerAway

DONE = httpx2.Response(200, json={"ok": True}, headers={"x-request-id": "req_1"})


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WAIT_S", 0.01)
    monkeypatch.setattr(module, "LONGEST_WAIT_S", 0.01)


def refusal(status: int, code: str = "server_overloaded", **headers: str) -> httpx2.Response:
    return httpx2.Response(status, json={"error": {"code": code}}, headers=headers)


async def send(answers: list[Any], patience: float = 0, **options: float) -> Reply:
    """Send a request to a server that gives these answers; all of them must be used."""

    def answer(request: httpx2.Request) -> httpx2.Response:
        found = answers.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    transport = httpx2.MockTransport(answer)
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
        reply = await Sender(http, patience, **options).send("/v1/completions", b"{}")
    assert not answers
    return reply


@pytest.mark.parametrize(
    "refused",
    [
        refusal(503),
        refusal(503, "model_loading", **{"retry-after": "5"}),
        refusal(429, "rate_limit_exceeded"),
        httpx2.Response(503, text="busy"),
    ],
)
async def test_refusal_of_a_busy_server_is_repeated(refused: httpx2.Response) -> None:
    assert await send([refused, refused, DONE]) == Reply(200, "req_1", b'{"ok":true}')


@pytest.mark.parametrize(
    "away",
    [
        lambda: refusal(503, "shutting_down"),
        lambda: refusal(503, "engine_unavailable"),
        lambda: httpx2.Response(502, text="bad gateway"),
        lambda: httpx2.ConnectError("refused"),
    ],
)
async def test_server_that_is_away_is_waited_for_with_patience_only(
    away: Callable[[], Any],
) -> None:
    with pytest.raises(ServerAway):
        await send([away()])
    assert not (await send([away(), away(), DONE], patience=60)).failed


@pytest.mark.parametrize(
    "failed",
    [refusal(400), refusal(500), refusal(503, **{"x-should-retry": "false"}), refusal(401)],
)
async def test_other_failures_are_the_result_of_the_line(failed: httpx2.Response) -> None:
    reply = await send([failed])
    assert reply.failed
    assert reply.status == failed.status_code
    assert reply.body is not None


async def test_refusals_for_too_long_are_the_result() -> None:
    assert (await send([refusal(503)], longest_retry=-1.0)).status == 503


@pytest.mark.parametrize("body", [b"", b"<html>", b"{", b'"\xff"', b"[" * 100_000])
async def test_answer_that_is_no_json_has_no_body(body: bytes) -> None:
    reply = await send([httpx2.Response(200, content=body)])
    assert reply.failed
    assert reply.body is None


async def test_answer_with_line_breaks_becomes_one_line() -> None:
    content = b'{\n  "a": "x y",\r\n  "b": [1, 2.50]\n}\n'
    reply = await send([httpx2.Response(200, content=content)])
    assert reply.body == b'{"a":"x y","b":[1,2.50]}'
