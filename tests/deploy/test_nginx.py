"""deploy/nginx/penstock.conf: what it passes on to a server, and what it blocks."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from pathlib import Path

import httpx2
import pytest

from loadtest.rolling_restart import nginx
from loadtest.servers import free_ports
from tests.server.conftest import write_model
from tests.support.fake_engine import FakeEngine
from tests.support.rig import serving


async def listening(port: int) -> None:
    """Wait until something listens on a port of this machine."""
    for _ in range(1000):
        with contextlib.suppress(OSError):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.close()
            return
        await asyncio.sleep(0.02)
    raise AssertionError("nginx did not start within 20 s")


@pytest.mark.parametrize("scheme", ["bearer", "x-api-key", "both"])
async def test_site_sends_the_responses_of_a_key_to_one_server(tmp_path: Path, scheme: str) -> None:
    if shutil.which("nginx") is None:
        pytest.skip("needs nginx (Debian: nginx-light)")
    model, (port,) = write_model(tmp_path / "m"), free_ports(1)
    keys = tuple(f"key-{number}" for number in range(10))
    fakes = [FakeEngine(lambda request: [65]) for _ in range(2)]
    async with (
        serving(fakes[0], model, api_key=keys) as one,
        serving(fakes[1], model, api_key=keys) as two,
    ):
        with nginx(tmp_path, [port, one.port, two.port]):
            await listening(port)
            for key in keys:
                sent = [{"authorization": f"Bearer {key}"}, {"x-api-key": key}]
                write, read = {"bearer": (0, 0), "x-api-key": (1, 1), "both": (0, 1)}[scheme]
                async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                    body = {"model": "m", "input": "x"}
                    made = await client.post("/v1/responses", headers=sent[write], json=body)
                    assert made.status_code == 200, made.text
                    path = f"/v1/responses/{made.json()['id']}"
                    for _ in range(2):
                        found = await client.get(path, headers=sent[read])
                        assert found.status_code == 200, found.text
    assert all(fake.requests for fake in fakes), "some of ten keys are on each server"


async def test_site_passes_the_api_on_and_blocks_pages_and_adapters(
    tmp_path: Path,
) -> None:
    if shutil.which("nginx") is None:
        pytest.skip("needs nginx (Debian: nginx-light)")
    async with serving(FakeEngine(lambda request: [65]), write_model(tmp_path / "m")) as served:
        (front,) = free_ports(1)
        port = served.address[1]
        with nginx(tmp_path, [front, port, port]):
            base = f"http://127.0.0.1:{front}"
            async with httpx2.AsyncClient(base_url=base, headers={"host": "a.example"}) as client:
                await listening(front)
                assert (await client.get("/v1/models")).status_code == 200
                body = {"model": served.app.state.penstock.names[0], "prompt": "x"}
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                for path in ("/ui", "/ui/", "/ui/api/hello", "/metrics", "/health"):
                    assert (await client.get(path)).status_code == 404, path
                for path in ("/v1/load_lora_adapter", "/v1/unload_lora_adapter"):
                    assert (await client.post(path, json={})).status_code == 404, path
