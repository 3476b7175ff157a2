"""A server over the real engine: adapters in one batch, loaded and unloaded while streams run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine.checkpoint.folder import model_folder
from engine.client.client import ProcessClient
from engine.config import EngineConfig
from engine.runner.load import load_engine
from tests.support.adapters import random_adapter
from tests.support.rig import Served, serving
from tests.support.thread_engine import ThreadChild

BASE = model_folder("demo")
PROMPT = "Once upon a time"


@pytest.fixture
async def lora(tmp_path: Path) -> AsyncIterator[Served]:
    first = random_adapter(tmp_path / "first", BASE, seed=1)
    random_adapter(tmp_path / "second", BASE, seed=2)
    config = EngineConfig(
        model=str(BASE),
        dtype="float32",
        threads=1,
        device="cpu",
        max_loras=2,
        lora_modules=(f"first={first}",),
    )
    client = ProcessClient(config, ThreadChild(config, load_engine(config)))  # type: ignore[arg-type]
    modules = config.lora_modules
    async with serving(client, BASE, lora_modules=modules) as served:  # type: ignore[arg-type]
        await client.wait_ready()
        yield served


async def text(served: Served, model: str, tokens: int = 12) -> str:
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0}
    response = await served.http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: str = response.json()["choices"][0]["text"]
    return answer


async def test_adapter_is_loaded_and_unloaded_while_streams_run(
    lora: Served, tmp_path: Path
) -> None:
    base = await text(lora, "", 120)
    streams = [asyncio.create_task(text(lora, model, 120)) for model in ("", "first")]
    body = {"lora_name": "second", "lora_path": str(tmp_path / "second")}
    loaded = await lora.http.post("/v1/load_lora_adapter", json=body)
    assert loaded.status_code == 200, loaded.text
    due = await text(lora, "second", 200)
    stream = await lora.openai.completions.create(
        model="second", prompt=PROMPT, max_tokens=200, temperature=0, stream=True
    )
    received = (await anext(stream)).choices[0].text
    unloaded = await lora.http.post("/v1/unload_lora_adapter", json={"lora_name": "second"})
    assert unloaded.status_code == 200
    async for chunk in stream:
        received += chunk.choices[0].text
    assert received == due
    first = await text(lora, "first", 120)
    assert await asyncio.gather(*streams) == [base, first]
    assert len({base[:20], first[:20], due[:20]}) == 3
    refused = await lora.http.post("/v1/completions", json={"model": "second", "prompt": PROMPT})
    assert refused.status_code == 404


async def test_bad_adapter_is_refused_with_the_engines_words(lora: Served, tmp_path: Path) -> None:
    random_adapter(tmp_path / "dora", BASE, use_dora=True)
    body = {"lora_name": "dora", "lora_path": str(tmp_path / "dora")}
    refused = await lora.http.post("/v1/load_lora_adapter", json=body)
    assert refused.status_code == 400
    assert "use_dora = True, which is not supported" in refused.json()["error"]["message"]
