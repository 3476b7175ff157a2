"""deploy/nginx/penstock.conf: the files and batches of a key are on one server."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from loadtest.rolling_restart import nginx
from loadtest.servers import free_ports
from tests.deploy.test_nginx import listening
from tests.server.conftest import write_model
from tests.support.fake_engine import FakeEngine
from tests.support.rig import serving


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
async def test_site_sends_the_files_of_a_key_to_one_server(
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
            for _ in range(2):
                found = await client.get(f"/v1/files/{made.json()['id']}", headers=sent[read])
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
