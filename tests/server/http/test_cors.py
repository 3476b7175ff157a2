"""CORS: web pages are accepted by origin, and a refused page learns the reason."""

from __future__ import annotations

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.prometheus import metric
from tests.support.rig import serving

PAGE = "https://chat.example"
WISH = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-retry-count",
}


@pytest.fixture
async def open_to(model, says, request):
    options = {"allowed_origins": request.param, "api_key": ("alpha",)}
    async with serving(FakeEngine(says("x")), model, **options) as served:
        yield served


@pytest.mark.parametrize(
    ("open_to", "answer"), [((PAGE,), PAGE), (("*",), "*")], indirect=["open_to"]
)
async def test_page_of_allowed_origin_sends_requests_and_reads_responses(open_to, answer):
    http = open_to.http
    wish = {"origin": PAGE, **WISH, "access-control-request-private-network": "true"}
    asked = await http.options("/v1/chat/completions", headers=wish)  # preflights carry no key
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == answer
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == WISH["access-control-request-headers"]
    assert asked.headers["access-control-allow-private-network"] == "true"
    assert "access-control-allow-credentials" not in asked.headers, "cookies are not allowed"

    key = {"authorization": "Bearer alpha"}
    body = {"prompt": "Hi", "stream": True, "max_tokens": 1}
    for headers, status in ((key, 200), ({}, 401)):
        headers = {"origin": PAGE, **headers}
        told = await http.post("/v1/completions", json=body, headers=headers)
        assert told.status_code == status, "a page needs a key, too"
        assert told.headers["access-control-allow-origin"] == answer, (
            "without it the page cannot read the response"
        )
        exposed = told.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after", "x-should-retry", "server-timing"} <= set(exposed)
        assert "Origin" in told.headers["vary"]


@pytest.mark.parametrize("open_to", [("localhost", PAGE)], indirect=True)
@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        *((origin, True) for origin in ("http://localhost", "https://localhost:8443", PAGE)),
        *((origin, True) for origin in ("http://127.0.0.1:3000", "http://[::1]", "http://[::1]:1")),
        *((origin, False) for origin in ("http://localhost.evil.example", "localhost", "null")),
        *((origin, False) for origin in ("http://notlocalhost", "http://127.0.0.1.evil.example")),
        *((origin, False) for origin in ("ftp://localhost", "http://localhost:80:1", "")),
    ],
)
async def test_localhost_allows_pages_of_this_machine_alone(open_to, origin, allowed):
    asked = await open_to.http.options("/v1/completions", headers={"origin": origin, **WISH})
    assert asked.status_code == (200 if allowed else 400)
    assert asked.headers.get("access-control-allow-origin") == (origin if allowed else None)


@pytest.mark.parametrize("open_to", [(PAGE,)], indirect=True)
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://chat.example", f"{PAGE}:8443", "null"]
)
async def test_preflight_from_other_origin_returns_400(open_to, origin):
    refused = await open_to.http.options("/v1/completions", headers={"origin": origin, **WISH})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("Disallowed CORS origin: see --allowed-")
    assert "access-control-allow-origin" not in refused.headers
    scraped = await open_to.http.get("/metrics", headers={"authorization": "Bearer alpha"})
    assert metric(scraped.text, "rejects_total", code="not_allowed") == 1
    assert metric(scraped.text, "http_requests_total", status="400") == 1


async def test_preflight_without_allowed_origins_returns_405(served):
    refused = await served.http.options("/v1/completions", headers={"origin": PAGE, **WISH})
    assert refused.status_code == 405
    assert "--allowed-origins" in refused.json()["error"]["message"]
    headers = {"origin": PAGE}
    answer = await served.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
    assert not [name for name in answer.headers if name.startswith("access-control")]
