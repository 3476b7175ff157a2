"""Every route: limits of the answer, the prompt, the body, the queue and the API key."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.api.contract.routes import Route, events
from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, serving

LONG = "x" * 600  # the context has 512 tokens


async def test_answer_ends_at_its_limit_and_says_so(served: Served, route: Route) -> None:
    whole = (await route.post(served, limit=4)).json()
    assert (route.text(whole), route.reason(whole)) == ("Hell", route.cut)
    assert route.usage(whole).generated == 4
    found, _ = events(await route.post(served, stream=True, limit=4))
    assert route.streamed_text(found) == "Hell"
    assert route.reason((await route.post(served)).json()) != route.cut


@pytest.mark.parametrize("stream", [False, True])
async def test_prompt_longer_than_the_context_is_refused(
    served: Served, route: Route, stream: bool
) -> None:
    body = json.loads(json.dumps(route.body).replace("Hi", LONG))
    response = await served.http.post(route.path, json={**body, "stream": stream})
    assert response.status_code == 400
    if not (route.is_anthropic or route.is_ollama):
        assert response.json()["error"]["code"] == "context_length_exceeded"
    assert "512 tokens" in response.text
    assert not served.engine.requests


async def test_body_larger_than_the_limit_is_refused(
    model: Path, says: Callable[[str], Script], route: Route
) -> None:
    async with serving(FakeEngine(says("x")), model, max_body_bytes=2000) as served:
        response = await route.post(served, user=LONG * 4)
        route.check_error(response.json(), 413, "request_too_large")
        assert (await route.post(served)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_key_that_has_used_its_requests_is_refused_until_it_has_more(
    model: Path, says: Callable[[str], Script], tmp_path: Path, route: Route, stream: bool
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("alpha requests_per_minute=1\n")
    async with serving(FakeEngine(says("x")), model, key="alpha", api_key_file=str(keys)) as served:
        first = await route.post(served, stream=stream)
        assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "0")
        second = await route.post(served, stream=stream)
        assert second.status_code == 429
        route.check_error(second.json(), 429, "rate_limit_exceeded")
        assert int(second.headers["retry-after"]) > 0
        assert len(served.engine.requests) == 1


async def test_request_without_a_key_is_refused(
    model: Path, says: Callable[[str], Script], route: Route
) -> None:
    async with serving(FakeEngine(says("x")), model, api_key=("alpha",)) as served:
        response = await route.post(served)
        assert response.status_code == 401
        route.check_error(response.json(), 401, "invalid_api_key")
        served.http.headers["authorization"] = "Bearer alpha"
        assert (await route.post(served)).status_code == 200
