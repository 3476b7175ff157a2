"""Scripts of web pages: let in by origin, refused otherwise, and told why they were refused."""

from __future__ import annotations

import pytest

from tests.prometheus import metric
from tests.server.fake_engine import FakeEngine
from tests.server.rig import serving

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
async def test_a_page_may_ask_and_read(open_to, answer):
    http = open_to.http
    wish = {"origin": PAGE, **WISH, "access-control-request-private-network": "true"}
    asked = await http.options("/v1/chat/completions", headers=wish)  # a browser sends no key here
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == answer
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"] == WISH["access-control-request-headers"]
    assert asked.headers["access-control-allow-private-network"] == "true"
    assert "access-control-allow-credentials" not in asked.headers, "no cookies"

    key = {"authorization": "Bearer alpha"}
    body = {"prompt": "Hi", "stream": True, "max_tokens": 1}
    for headers, status in ((key, 200), ({}, 401)):
        headers = {"origin": PAGE, **headers}
        told = await http.post("/v1/completions", json=body, headers=headers)
        assert told.status_code == status, "the key is asked for as ever"
        assert told.headers["access-control-allow-origin"] == answer, (
            "or the page could not read it"
        )
        exposed = told.headers["access-control-expose-headers"].split(", ")
        assert {"x-request-id", "retry-after", "x-should-retry"} <= set(exposed)
        assert "Origin" in told.headers["vary"]


@pytest.mark.parametrize("open_to", [(PAGE,)], indirect=True)
@pytest.mark.parametrize(
    "origin", ["https://evil.example", "http://chat.example", f"{PAGE}:8443", "null"]
)
async def test_other_pages_may_not(open_to, origin):
    refused = await open_to.http.options("/v1/completions", headers={"origin": origin, **WISH})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith("Disallowed CORS origin: see --allowed-")
    assert "access-control-allow-origin" not in refused.headers
    scraped = await open_to.http.get("/metrics", headers={"authorization": "Bearer alpha"})
    assert metric(scraped.text, "rejects_total", code="not_allowed") == 1
    assert metric(scraped.text, "http_requests_total", status="400") == 1


async def test_no_page_may_by_default(served):
    refused = await served.http.options("/v1/completions", headers={"origin": PAGE, **WISH})
    assert refused.status_code == 405
    assert "--allowed-origins" in refused.json()["error"]["message"]
    headers = {"origin": PAGE}
    answer = await served.http.post("/v1/completions", json={"prompt": "Hi"}, headers=headers)
    assert not [name for name in answer.headers if name.startswith("access-control")]
