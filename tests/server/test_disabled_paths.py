"""--disabled-paths: a 501 that says so, for all methods, and nothing in documents of the API."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.errors import ConfigError
from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import serving

OFF = ("/metrics", "/capabilities", "/v1/completions", "/v1/rerank")


async def test_disabled_path_answers_501_and_the_others_as_ever(
    model: Path, says: Callable[[str], Script]
) -> None:
    async with serving(FakeEngine(says("x")), model, disabled_paths=OFF) as served:
        for method, path in (
            ("GET", "/metrics"),
            ("HEAD", "/metrics"),
            ("GET", "/capabilities"),
            ("POST", "/capabilities"),
            ("POST", "/v1/completions"),
            ("GET", "/v1/completions"),
            ("DELETE", "/v1/completions"),
        ):
            response = await served.http.request(method, path, json={"prompt": "a"})
            assert response.status_code == 501, (method, path)
            assert response.headers["x-should-retry"] == "false"
            if method != "HEAD":
                error = response.json()["error"]
                assert (error["code"], error["type"]) == ("path_disabled", "server_error")
                assert path in error["message"]
        assert (await served.http.get("/tokenizer_info")).status_code == 200
        answer = await served.http.post("/rerank", json={"query": "a", "documents": ["b"]})
        assert answer.json()["error"]["code"] == "unsupported_model", "the other name is served"
        assert not {*OFF} & {*(await served.http.get("/openapi.json")).json()["paths"]}


async def test_disabled_path_is_not_listed_as_a_capability(
    model: Path, says: Callable[[str], Script]
) -> None:
    async with serving(FakeEngine(says("x")), model, disabled_paths=("/metrics",)) as served:
        listed = (await served.http.get("/capabilities")).text
        assert '"/metrics"' not in listed
        assert '"/tokenizer_info"' in listed


async def test_disabled_path_needs_a_key_where_the_server_has_one(
    model: Path, says: Callable[[str], Script]
) -> None:
    fields = {"disabled_paths": ("/capabilities",), "api_key": ("k",)}
    async with serving(FakeEngine(says("x")), model, key="k", **fields) as served:
        assert (await served.http.get("/capabilities")).status_code == 501
        bare = await served.http.get("/capabilities", headers={"authorization": ""})
        assert bare.status_code == 401


@pytest.mark.parametrize("path", ["/metric", "/slots/", "/v1", "/ui/"])
async def test_disabled_path_that_is_none_of_the_server_stops_the_start(
    model: Path, says: Callable[[str], Script], path: str
) -> None:
    with pytest.raises(ConfigError, match="no path of this server"):
        async with serving(FakeEngine(says("x")), model, disabled_paths=(path,)):
            pass
