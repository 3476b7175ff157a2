"""--root-path, a prefix that a proxy leaves before every path; and the headers of responses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import httpx2
import msgspec
import pytest

from server.config import ServerConfig
from server.http.boundary import RESPONSE_HEADERS
from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, serving

CLIENTS = Path(__file__).resolve().parents[3] / "docs" / "clients.md"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


async def test_paths_below_the_root_path_are_served_as_those_without_it(
    model: Path, says: Callable[[str], Script]
) -> None:
    engine = FakeEngine(says("Hello"))
    async with serving(engine, model, root_path="/llm", key="k", api_key=("k",)) as served:
        for path in ("/llm/v1/chat/completions", "/v1/chat/completions"):
            chat = await served.http.post(path, json=BODY)
            assert chat.json()["choices"][0]["message"]["content"] == "Hello"
            bare = await served.http.post(path, json=BODY, headers={"authorization": ""})
            assert bare.status_code == 401
        for path in ("/llm/health", "/llm/openapi.json"):
            assert (await served.http.get(path)).status_code == 200
        for path in ("/llm", "/llm/llm/health", "/llmv1/models", "/other/health"):
            assert (await served.http.get(path)).status_code == 404


async def test_errors_below_the_root_path_have_the_form_of_their_api(
    model: Path, says: Callable[[str], Script]
) -> None:
    async with serving(FakeEngine(says("Hello")), model, root_path="/a/b") as served:
        host, port = served.address
        async with httpx2.AsyncClient(base_url=f"http://{host}:{port}") as http:
            response = await http.post("/a/b/v1/messages", json={})
        assert (response.status_code, response.json()["type"]) == (400, "error")


@pytest.mark.parametrize("value", ["llm", "/llm/", "/", "/..", "/a/../b", "/a b", "/a%2Fb", "/a\n"])
def test_values_that_are_no_prefix_are_refused(value: str) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"root_path": value}, ServerConfig)
    assert msgspec.convert({"root_path": "/a-1/b.c"}, ServerConfig).root_path == "/a-1/b.c"


async def test_response_headers_are_listed_and_documented(served: Served) -> None:
    answer = await served.chat(unknown=1, max_tokens=10**6)
    own = {name for name in answer.headers if name.startswith(("x-", "openai-"))}
    assert own <= set(RESPONSE_HEADERS)
    assert {"x-ignored-params", "x-adjusted-params"} <= own
    page = CLIENTS.read_text(encoding="utf-8")
    assert [name for name in RESPONSE_HEADERS if f"| `{name}` |" not in page] == []
