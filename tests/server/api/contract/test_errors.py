"""Every route: an error before the first token has a status; a later one ends the stream."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import EngineOverloadedError, RequestRejectedError
from tests.server.api.contract.routes import Route, events, is_error
from tests.support.fake_engine import NOT_FINITE, FakeEngine, Script
from tests.support.rig import Served, eventually, serving

Encode = Callable[[str], list[int]]


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


async def refused(
    served: Served, route: Route, stream: bool, status: int, code: str, **fields: object
) -> dict[str, str]:
    """Send a request, which must be refused with this status and code. Return the headers."""
    response = await route.post(served, stream=stream, **fields)
    assert response.status_code == status, response.text
    route.check_error(response.json(), status, code)
    return dict(response.headers)


async def test_engine_that_is_not_ready_is_503(served: Served, route: Route, stream: bool) -> None:
    for state, code in (("loading", "model_loading"), ("draining", "shutting_down")):
        served.engine.state = state
        headers = await refused(served, route, stream, 503, code)
        assert int(headers["retry-after"]) > 0
    assert headers["connection"] == "close"
    served.engine.state = "ready"
    served.engine.overloaded = True
    headers = await refused(served, route, stream, 503, "server_overloaded", limit="not looked at")
    assert headers["retry-after"] == "7"
    served.engine.die()
    headers = await refused(served, route, stream, 503, "engine_unavailable")
    assert headers["retry-after"] == "10"
    assert await served.metric("rejects_total", code="server_overloaded") == 1


async def test_request_refused_at_submission_has_a_status_and_no_abort(
    served: Served, route: Route, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(requests: object) -> None:
        raise EngineOverloadedError("The queue is full.", retry_after=7)

    monkeypatch.setattr(served.engine, "submit", refuse)
    headers = await refused(served, route, stream, 503, "server_overloaded")
    assert headers["retry-after"] == "7"
    assert await served.metric("aborts_total") == 0


async def test_request_that_the_engine_rejects_has_a_status(
    served: Served, route: Route, stream: bool
) -> None:
    served.engine.reject = RequestRejectedError("invalid_grammar", "It is too large.", "a.field")
    response = await route.post(served, stream=stream)
    assert response.status_code == 400
    route.check_error(response.json(), 400, "invalid_grammar")
    if not (route.is_anthropic or route.is_ollama):
        assert response.json()["error"]["param"] == "a.field"


async def test_engine_that_dies_before_the_first_token_is_503(
    served: Served, route: Route, stream: bool
) -> None:
    served.engine.gate.clear()
    task = asyncio.create_task(route.post(served, stream=stream))
    await eventually(lambda: served.engine.busy, "the request runs")
    served.engine.die()
    response = await task
    assert response.status_code == 503
    route.check_error(response.json(), 503, "engine_unavailable")
    assert "secret" not in response.text
    assert await served.metric("aborts_total", reason="engine") == 1


async def test_answer_whose_logits_are_not_finite_is_500(
    model: Path, encode: Encode, route: Route
) -> None:
    script = [*encode("Hello"), NOT_FINITE]
    async with serving(FakeEngine(lambda request: script), model) as served:
        headers = await refused(served, route, False, 500, "numerical_error")
        assert headers["x-should-retry"] == "false"


async def test_stream_whose_logits_are_not_finite_ends_with_an_error(
    model: Path, encode: Encode, route: Route
) -> None:
    script = [*encode("Hello"), NOT_FINITE]
    async with serving(FakeEngine(lambda request: script, delay=0.005), model) as served:
        response = await route.post(served, stream=True)
        found, is_done = events(response)
        check_broken(route, found, is_done, 500, "numerical_error")
        if route.is_anthropic:
            assert found[-1]["request_id"] == response.headers["request-id"]
        assert await served.metric("aborts_total", reason="numerical") == 1


@pytest.mark.parametrize(
    ("drains", "code", "reason"),
    [(False, "engine_unavailable", "engine"), (True, "shutting_down", "shutdown")],
)
async def test_stream_of_an_engine_that_dies_ends_with_an_error(
    model: Path,
    says: Callable[[str], Script],
    route: Route,
    drains: bool,
    code: str,
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(FakeEngine(says("Hello" * 60), delay=0.005), model) as served:
        task = asyncio.create_task(route.post(served, stream=True, limit=400))
        await eventually(lambda: served.engine.stats.step > 5, "text is sent")
        if drains:
            served.engine.drain()
        served.engine.die()
        check_broken(route, *events(await task), 503, code)
        assert await served.metric("aborts_total", reason=reason) == 1
    assert "Traceback" not in caplog.text
    assert "ASGI callable" not in caplog.text
    assert drains or "'status': 500" in caplog.text
    assert "'status': 499" not in caplog.text


def check_broken(
    route: Route, found: list[dict[str, object]], is_done: bool, status: int, code: str
) -> None:
    """Check that a stream has the beginning of its text, then an error, and no regular end."""
    first = next(place for place, event in enumerate(found) if is_error(event))
    assert route.streamed_text(found[:first]).startswith("Hello"[: max(1, first - 4)])
    route.check_error(found[first], status, code)
    assert not is_done
    assert not any(route.is_last(event) for event in found[:first])
    assert [event["type"] for event in found[first + 1 :]] in ([], ["response.failed"])


async def test_unexpected_exception_is_500_without_its_text(
    served: Served,
    route: Route,
    stream: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("secret at /home/user 0x7f00")

    monkeypatch.setattr(served.app.state.penstock.client, "submit", broken)
    response = await route.post(served, stream=stream)
    assert response.status_code == 500
    assert response.headers["x-should-retry"] == "false"
    assert "secret" not in response.text
    assert response.headers["x-request-id"] in response.text
    assert "secret at /home/user" in caplog.text
    assert (await served.http.get("/health")).status_code == 200


async def test_body_that_is_no_json_or_has_an_unknown_model_is_refused(
    served: Served, route: Route
) -> None:
    headers = {"content-type": "application/json"}
    response = await served.http.post(route.path, content=b'{"a', headers=headers)
    assert response.status_code == 400
    route.check_error(response.json(), 400, "invalid_json")
    response = await route.post(served, model="other")
    assert response.status_code == 404
    route.check_error(response.json(), 404, "model_not_found")
    assert "'other'" in response.text
    assert not served.engine.requests
