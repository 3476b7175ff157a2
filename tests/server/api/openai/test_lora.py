"""LoRA adapters over HTTP: the model of a request, /v1/models, loading and unloading."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import msgspec
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.adapters import AdapterRegistry
from server.app import create_app
from server.config import ServerConfig
from server.http.errors import ApiError
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.rig import Served, serving

GIVEN = ("fr=/a/french", "de=/a/german")


def engine_with_adapters() -> FakeEngine:
    info = msgspec.structs.replace(INFO, max_loras=4)
    return FakeEngine(lambda request: [65, 66], info=info)


@pytest.fixture
async def lora(model: Path) -> AsyncIterator[Served]:
    engine = engine_with_adapters()
    async with serving(engine, model, lora_modules=GIVEN) as served:
        yield served


async def load(served: Served, name: str, path: str, **more: str) -> httpx2.Response:
    body = {"lora_name": name, "lora_path": path, **more}
    return await served.http.post("/v1/load_lora_adapter", json=body)


async def unload(served: Served, name: str) -> httpx2.Response:
    return await served.http.post("/v1/unload_lora_adapter", json={"lora_name": name})


async def test_model_of_a_request_chooses_the_adapter(lora: Served) -> None:
    base = (await lora.http.get("/v1/models")).json()["data"][0]["id"]
    prints = set()
    for name, adapter in ((base, 0), ("fr", 1), ("de", 2)):
        answer = (await lora.complete(model=name, max_tokens=2)).json()
        assert answer["model"] == name
        assert lora.engine.requests[-1].adapter == adapter
        prints.add(answer["system_fingerprint"])
        await lora.chat(model=name, max_tokens=1)
        await lora.message(model=name, max_tokens=1)
        assert [request.adapter for request in lora.engine.requests[-3:]] == [adapter] * 3
    assert len(prints) == 3, "a replay must not compare answers of different adapters"


async def test_unknown_model_is_refused_and_adapters_are_named(lora: Served) -> None:
    refused = await lora.complete(model="it")
    assert refused.status_code == 404
    assert refused.json()["error"]["code"] == "model_not_found"
    assert refused.json()["error"]["message"].endswith(", fr, de.")


async def test_models_lists_adapters_with_parent_and_root(lora: Served) -> None:
    base, *adapters = (await lora.http.get("/v1/models")).json()["data"]
    assert (base["parent"], base["root"]) == (None, base["id"])
    shown = [(entry["id"], entry["parent"], entry["root"]) for entry in adapters]
    assert shown == [("fr", base["id"], "/a/french"), ("de", base["id"], "/a/german")]
    assert (await lora.http.get("/v1/models/de")).json() == adapters[1]


async def test_cached_tokens_are_those_of_the_adapter(lora: Served) -> None:
    for name, adapter in (("fr", 1), ("", 0)):
        body = {"model": name, "messages": [{"role": "user", "content": "Hi"}]}
        await lora.http.post("/v1/chat/completions/render", json=body)
        assert lora.engine.lookup_adapters[-1] == adapter


async def test_adapter_loaded_and_unloaded_while_serving(lora: Served) -> None:
    loaded = await load(lora, "it", "/a/italian")
    assert (loaded.status_code, loaded.json()["root"]) == (200, "/a/italian")
    await lora.complete(model="it", max_tokens=1)
    assert lora.engine.requests[-1].adapter == 3
    assert lora.engine.adapters == {3: "/a/italian"}
    gone = await unload(lora, "it")
    assert gone.json() == {"id": "it", "object": "model", "deleted": True}
    assert lora.engine.adapters == {}
    assert (await lora.complete(model="it")).status_code == 404
    await load(lora, "it", "/a/italian")
    assert list(lora.engine.adapters) == [4], "a name that is loaded again has another number"


async def test_adapter_that_cannot_be_loaded_is_refused(lora: Served) -> None:
    base = (await lora.http.get("/v1/models")).json()["data"][0]["id"]
    for name in ("fr", base):
        taken = (await load(lora, name, "/x")).json()["error"]
        assert (taken["param"], taken["message"][:10]) == ("lora_name", "The name '")
    lora.engine.adapter_problem = "has use_dora = True, which is not supported."
    refused = await load(lora, "it", "/x")
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert (error["code"], error["param"]) == ("invalid_adapter", "lora_path")
    assert error["message"] == lora.engine.adapter_problem
    assert (await lora.complete(model="it")).status_code == 404
    assert (await unload(lora, "it")).status_code == 404
    assert (await load(lora, "", "/x")).status_code == 400


async def test_loading_needs_an_admin_key(model: Path, tmp_path: Path) -> None:
    (tmp_path / "admins").write_text("mighty-key\n")
    keys = {"api_key": ("plain-key",), "admin_key_file": str(tmp_path / "admins")}
    for key, status in (("plain-key", 403), ("mighty-key", 200)):
        engine = engine_with_adapters()
        async with serving(engine, model, key, **keys) as served:
            answer = await load(served, "it", "/a/italian")
            assert answer.status_code == status
            assert bool(engine.adapters) == (status == 200)
            if status == 403:
                assert "--admin-key-file" in answer.json()["error"]["message"]
                assert (await unload(served, "it")).status_code == 403


async def test_loading_without_keys_needs_a_loopback_address(model: Path) -> None:
    async with serving(engine_with_adapters(), model, host="0.0.0.0") as served:
        refused = await load(served, "it", "/a/italian")
        assert refused.status_code == 403
        assert "loopback" in refused.json()["error"]["message"]


async def test_loading_on_a_server_without_slots_is_not_found(model: Path) -> None:
    async with serving(FakeEngine(lambda request: [65]), model) as served:
        refused = await load(served, "it", "/a/italian")
        assert refused.status_code == 404
        assert "start it with --max-loras" in refused.json()["error"]["message"]


def test_adapters_with_one_name_twice_are_refused(model: Path) -> None:
    for given in (("a=/x", "a=/y"), (f"{model.name}=/x",)):
        config = EngineConfig(model=str(model), lora_modules=given)
        with pytest.raises(ConfigError, match="is given twice"):
            create_app(ServerConfig(), config, FakeEngine(lambda request: [65]))


async def test_cancelled_load_leaves_no_adapter(model: Path) -> None:
    engine = FakeEngine(lambda request: [65])
    registry = AdapterRegistry(["base"])
    engine.gate.clear()
    loading = asyncio.create_task(registry.load(engine, "it", "/a/italian"))
    await asyncio.sleep(0)
    assert engine.adapters == {1: "/a/italian"}
    with pytest.raises(ApiError, match="is taken"):
        await registry.load(engine, "it", "/a/italian")
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert engine.adapters == {}
    engine.gate.set()
    assert (await registry.load(engine, "it", "/a/italian")).id == 2
