"""No API key may take all from the others: priority, choices, texts, bodies, documents."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request

from engine.errors import ConfigError
from server.config import ServerConfig
from server.generation.cache_salt import cache_salt_of
from server.http.key_file import read_limited_keys
from tests.support.fake_encoder import FakeEncoder
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, eventually, serving
from tests.support.several_keys import by, settings


@pytest.fixture
async def keyed(model: Path, says: Any, tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(FakeEngine(says("Hello!")), model, **settings(tmp_path)) as served:
        yield served


async def complete(served: Served, key: str, **fields: Any) -> Any:
    body = {"prompt": "a", **fields}
    return await served.http.post("/v1/completions", json=body, headers=by(key))


# ---- priority ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "priority", "status"),
    [
        ("plain", -1, 403),
        ("plain", 7, 403),
        ("plain", 0, 200),
        ("pair", -(2**31) + 1, 403),
        ("first", -1, 200),
        ("admin", -1, 200),
    ],
)
async def test_priority_needs_a_key_with_the_permission(
    keyed: Served, key: str, priority: int, status: int
) -> None:
    answer = await complete(keyed, key, priority=priority)
    assert answer.status_code == status
    if status == 403:
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("priority", "permission_denied")
        assert not keyed.engine.requests


async def test_priority_of_embeddings_needs_the_permission(model: Path, tmp_path: Path) -> None:
    encoder = FakeEncoder(lambda request: [])
    async with serving(encoder, model, **settings(tmp_path)) as served:
        for key, status in (("plain", 403), ("first", 200)):
            body = {"input": "a", "priority": -1}
            answer = await served.http.post("/v1/embeddings", json=body, headers=by(key))
            assert answer.status_code == status


def name_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def test_priority_without_keys_is_allowed(model: Path, says: Any) -> None:
    async with serving(FakeEngine(says("x")), model) as served:
        assert (await served.complete(priority=-1)).status_code == 200


def test_key_file_with_another_priority_is_refused(tmp_path: Path) -> None:
    config = ServerConfig(**settings(tmp_path, "key priority=5\n"))
    with pytest.raises(ConfigError, match="line 1: priority must be true or false"):
        read_limited_keys(config)


# ---- choices and texts ---------------------------------------------------------------------------


async def test_choices_count_as_concurrent_requests(keyed: Served) -> None:
    answer = await complete(keyed, "pair", n=3)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "n"
    assert (await complete(keyed, "pair", prompt=["a", "b", "c"])).status_code == 400
    assert (await complete(keyed, "pair", best_of=3)).status_code == 400
    keyed.engine.gate.clear()
    first = asyncio.create_task(complete(keyed, "pair"))
    await eventually(lambda: bool(keyed.engine.requests), "the first request runs")
    assert (await complete(keyed, "pair", n=2)).status_code == 429
    keyed.engine.gate.set()
    assert (await first).status_code == 200
    for _ in range(3):  # each gives back what it took
        assert (await complete(keyed, "pair", n=2)).status_code == 200


async def test_texts_to_embed_count_as_concurrent_requests(model: Path, tmp_path: Path) -> None:
    async with serving(FakeEncoder(lambda request: []), model, **settings(tmp_path)) as served:
        for texts, status in ((2, 200), (3, 400), (2, 200)):
            body = {"input": ["a"] * texts}
            answer = await served.http.post("/v1/embeddings", json=body, headers=by("pair"))
            assert answer.status_code == status
            if status == 400:
                assert answer.json()["error"]["param"] == "input"


# ---- the prefix cache ----------------------------------------------------------------------------


def test_cache_salt_of_two_tenants_never_is_the_same() -> None:
    def salt(tenant: str, given: str) -> str:
        return cache_salt_of(Request({"type": "http", "state": {"key_owner": tenant}}), given)

    names = ["a", "ab", "b", "1", "1:a", "11", ":"]
    pairs = [(tenant, given) for tenant in names for given in ["", *names]]
    assert len({salt(*pair) for pair in pairs}) == len(pairs)
    assert salt("", "given") == "given"


async def test_cache_salt_of_all_routes_is_the_same(keyed: Served) -> None:
    await complete(keyed, "plain", cache_salt="s")
    chat = {"messages": [{"role": "user", "content": "a"}], "cache_salt": "s"}
    answer = await keyed.http.post("/v1/chat/completions", json=chat, headers=by("plain"))
    assert answer.status_code == 200
    salts = {request.salt for request in keyed.engine.requests}
    assert salts == {f"64:{name_of('plain')}s"}


async def test_only_key_of_a_server_has_prefixes_of_its_own(
    model: Path, says: Any, tmp_path: Path
) -> None:
    """With --kv-cache-dir the next start may have another key, which must not find them."""
    given = {"api_key_file": settings(tmp_path, "first\n")["api_key_file"]}
    async with serving(FakeEngine(says("x")), model, **given) as served:
        assert (await complete(served, "first")).status_code == 200
        assert [request.salt for request in served.engine.requests] == [f"64:{name_of('first')}"]


# ---- bodies, documents and pages -----------------------------------------------------------------


async def begin_body(served: Served, key: str, size: int) -> tuple[Any, Any]:
    """Start a request, and send `size` bytes of a body of twice that length."""
    reader, writer = await asyncio.open_connection(*served.address)
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
        f"content-type: application/json\r\ncontent-length: {size * 2}\r\n\r\n"
    )
    writer.write(head.encode() + b" " * size)
    return reader, writer


async def test_bodies_of_one_key_leave_room_for_those_of_another(
    model: Path, says: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 1000
    monkeypatch.setattr("server.http.auth.MIN_BODY_BUDGET", 0)
    monkeypatch.setattr("server.http.auth.MAX_BODIES", 4)
    limits = settings(tmp_path) | {"max_body_bytes": 2 * size}
    async with serving(FakeEngine(says("x")), model, **limits) as served:
        senders = [await begin_body(served, "plain", size) for _ in range(5)]
        done, _ = await asyncio.wait(
            [asyncio.create_task(reader.read(-1)) for reader, _ in senders],
            return_when=asyncio.FIRST_COMPLETED,
        )
        [refused] = [task.result() for task in done]  # half of 8000 bytes hold four
        assert refused.startswith(b"HTTP/1.1 503 ")
        assert b"with this API key" in refused
        assert (await complete(served, "first", unknown="a" * size)).status_code == 200
        for _, writer in senders:
            writer.close()
        async with asyncio.timeout(20):
            answer = await complete(served, "plain", unknown="a" * size)
            while answer.status_code == 503:  # the server has to see that they are closed
                await asyncio.sleep(0.01)
                answer = await complete(served, "plain", unknown="a" * size)
        assert answer.status_code == 200


async def test_key_with_limits_makes_the_server_write_documents_seldom(
    keyed: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = 0
    exposition = type(keyed.app.state.exposition)
    render = exposition.render

    def counted(self: Any, max_age: float = 0.0) -> bytes:
        nonlocal written
        before = self._rendered_at
        text = render(self, max_age)
        written += self._rendered_at != before
        return text

    monkeypatch.setattr(exposition, "render", counted)
    for key, most in (("slow", 2), ("plain", 20)):
        written = 0
        for _ in range(20):
            assert (await keyed.http.get("/metrics", headers=by(key))).status_code == 200
        assert written <= most
    assert written == 20
    first = keyed.app.openapi_json()
    assert (await keyed.http.get("/openapi.json", headers=by("slow"))).content == first
    assert keyed.app.openapi_json() is first
