"""deploy/nginx/penstock.conf: what it passes on to a server, and what it blocks."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

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


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[str]:
    """nginx before two servers that have the same ten keys and each its own folder of files."""
    if shutil.which("nginx") is None:
        pytest.skip("needs nginx (Debian: nginx-light)")
    model = write_model(tmp_path / "m")
    keys = tuple(f"key-{number}" for number in range(10))
    fakes = [FakeEngine(lambda request: [65]) for _ in range(2)]
    limits: dict[str, Any] = {"api_key": keys}
    (port,) = free_ports(1)
    async with (
        serving(fakes[0], model, batch_dir=str(tmp_path / "one"), **limits) as one,
        serving(fakes[1], model, batch_dir=str(tmp_path / "two"), **limits) as two,
    ):
        with nginx(tmp_path, [port, one.port, two.port]):
            await listening(port)
            yield f"http://127.0.0.1:{port}"


@pytest.mark.parametrize("scheme", ["bearer", "x-api-key", "both"])
async def test_site_sends_the_files_and_responses_of_a_key_to_one_server(
    front: str, tmp_path: Path, scheme: str
) -> None:
    for number in range(10):
        key = f"key-{number}"
        sent = [{"authorization": f"Bearer {key}"}, {"x-api-key": key}]
        write, read = {"bearer": (0, 0), "x-api-key": (1, 1), "both": (0, 1)}[scheme]
        async with httpx2.AsyncClient(base_url=front) as client:
            form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", b"{}\n")}}
            made = await client.post("/v1/files", headers=sent[write], **form)
            assert made.status_code == 200, made.text
            body = {"model": "m", "input": "x"}
            response = await client.post("/v1/responses", headers=sent[write], json=body)
            assert response.status_code == 200, response.text
            for path in (f"files/{made.json()['id']}", f"responses/{response.json()['id']}") * 2:
                found = await client.get(f"/v1/{path}", headers=sent[read])
                assert found.status_code == 200, found.text
    used = [len(list((tmp_path / name).rglob("file-*"))) for name in ("one", "two")]
    assert all(used), "some of ten keys are on each server"


async def test_site_passes_files_above_the_limit_of_other_bodies(front: str) -> None:
    headers = {"authorization": "Bearer key-1"}
    content = b"x" * (9 << 20)
    async with httpx2.AsyncClient(base_url=front, headers=headers, timeout=60) as client:
        form = {"data": {"purpose": "batch"}, "files": {"file": ("in.jsonl", content)}}
        made = await client.post("/v1/files", **form)
        assert made.status_code == 200, made.text
        assert made.json()["bytes"] == len(content)
        assert (await client.post("/v1/completions", content=content)).status_code == 413


async def test_site_sends_a_batch_to_no_other_server_while_its_own_is_away(tmp_path: Path) -> None:
    """Without keys all files are on one server; the other would answer that it knows none."""
    if shutil.which("nginx") is None:
        pytest.skip("needs nginx (Debian: nginx-light)")
    model, ports = write_model(tmp_path / "m"), free_ports(3)
    seen = set()
    for number in (1, 2):
        fields = {"port": ports[number], "batch_dir": str(tmp_path / f"d{number}")}
        async with serving(FakeEngine(lambda request: [65]), model, **fields):
            with nginx(tmp_path, ports):
                await listening(ports[0])
                async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{ports[0]}") as client:
                    seen.add((await client.get("/v1/batches/batch-1")).status_code)
                    assert (await client.get("/v1/models")).status_code == 200
    assert seen == {404, 502}


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
