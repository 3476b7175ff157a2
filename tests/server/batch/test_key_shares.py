"""No API key may take all room for files and batches from the others."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, eventually, serving
from tests.support.several_keys import by, settings

LINE = '{"custom_id":"%s","method":"POST","url":"/v1/completions","body":{"prompt":"a"%s}}\n'


def batch_settings(tmp_path: Path, *keys: str) -> dict[str, Any]:
    return settings(tmp_path, *keys) | {"batch_dir": str(tmp_path / "batches")}


@pytest.fixture
async def keyed(model: Path, says: Any, tmp_path: Path) -> AsyncIterator[Served]:
    async with serving(FakeEngine(says("Hello!")), model, **batch_settings(tmp_path)) as served:
        yield served


async def upload(served: Served, key: str, lines: str) -> Any:
    form = {"purpose": (None, "batch"), "file": ("in.jsonl", lines.encode())}
    return await served.http.post("/v1/files", files=form, headers=by(key))


async def start_batch(served: Served, key: str, lines: str) -> Any:
    """Return the response to the creation of a batch."""
    file_id = (await upload(served, key, lines)).json()["id"]
    body = {
        "input_file_id": file_id,
        "endpoint": "/v1/completions",
        "completion_window": "24h",
    }
    return await served.http.post("/v1/batches", json=body, headers=by(key))


async def batch_of(served: Served, key: str, batch_id: str) -> dict[str, Any]:
    answer = await served.http.get(f"/v1/batches/{batch_id}", headers=by(key))
    found: dict[str, Any] = answer.json()
    return found


async def ended(served: Served, key: str, batch_id: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            batch = await batch_of(served, key, batch_id)
            if batch["status"] == "completed":
                return batch
            await asyncio.sleep(0.05)


def name_of(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


async def test_priority_in_a_line_of_a_batch_needs_the_permission(keyed: Served) -> None:
    for key, failed in (("plain", 1), ("first", 0)):
        lines = LINE % ("a", "") + LINE % ("b", ',"priority":-5')
        batch = (await start_batch(keyed, key, lines)).json()
        done = await ended(keyed, key, batch["id"])
        assert done["request_counts"] == {"total": 2, "completed": 2 - failed, "failed": failed}


async def test_uploads_count_for_the_limits_of_their_key(keyed: Served) -> None:
    statuses = [(await upload(keyed, "slow", LINE % ("a", ""))).status_code for _ in range(3)]
    assert statuses == [200, 200, 429]
    answer = await keyed.http.get("/v1/files", headers=by("slow"))
    assert answer.status_code == 200, "only bodies count"


@pytest.mark.parametrize("limit", ["max_batch_files", "max_batch_dir_bytes"])
async def test_uploads_of_one_key_leave_room_for_others(
    model: Path, says: Any, tmp_path: Path, limit: str
) -> None:
    size = len(LINE % ("a", ""))
    most = {"max_batch_files": 8, "max_batch_dir_bytes": 8 * size + size // 2}[limit]
    given = batch_settings(tmp_path) | {limit: most}
    async with serving(FakeEngine(says("x")), model, **given) as served:
        answers = [await upload(served, "plain", LINE % ("a", "")) for _ in range(9)]
        assert [answer.status_code for answer in answers] == [200] * 4 + [400] * 5
        assert "share" in answers[-1].json()["error"]["message"]
        assert (await upload(served, "first", LINE % ("a", ""))).status_code == 200
        file_id = answers[0].json()["id"]
        await served.http.delete(f"/v1/files/{file_id}", headers=by("plain"))
    async with serving(FakeEngine(says("x")), model, **given) as served:  # counts are read again
        statuses = [(await upload(served, "plain", LINE % ("a", ""))).status_code for _ in "ab"]
        assert statuses == [200, 400]


async def test_batch_lines_wait_for_the_concurrency_of_their_key(keyed: Served) -> None:
    keyed.engine.gate.clear()
    lines = "".join(LINE % (number, "") for number in range(6))
    batch = (await start_batch(keyed, "pair", lines)).json()
    await eventually(lambda: len(keyed.engine.running) == 2, "two lines run")
    await asyncio.sleep(0.5)
    assert len(keyed.engine.running) == 2
    keyed.engine.gate.set()
    done = await ended(keyed, "pair", batch["id"])
    assert done["request_counts"] == {"total": 6, "completed": 6, "failed": 0}


@pytest.mark.parametrize(
    "keys", ["slow requests_per_minute=3\n", "slow requests_per_minute=3\nb\n"]
)
async def test_batch_lines_wait_for_the_rate_of_their_key(
    model: Path, says: Any, tmp_path: Path, keys: str
) -> None:
    """Also where there is one key, whose requests have no tenant. The upload counts, too."""
    given = batch_settings(tmp_path, keys) | {"admin_key_file": None}
    async with serving(FakeEngine(says("x")), model, **given) as served:
        lines = "".join(LINE % (number, "") for number in range(4))
        batch = (await start_batch(served, "slow", lines)).json()
        await eventually(lambda: len(served.engine.requests) == 1, "a line is sent")
        await asyncio.sleep(0.5)
        assert len(served.engine.requests) == 1
        found = await batch_of(served, "slow", batch["id"])
        assert found["status"] == "in_progress"
        assert found["request_counts"]["failed"] == 0


async def test_eight_batches_of_one_key_let_the_batch_of_another_run(keyed: Served) -> None:
    keyed.engine.gate.clear()
    lines = "".join(LINE % (number, "") for number in range(9))
    for _ in range(8):
        assert (await start_batch(keyed, "plain", lines)).status_code == 200
    await eventually(lambda: len(keyed.engine.running) == 4, "half of the engine is in use")
    batch = (await start_batch(keyed, "first", LINE % ("a", ""))).json()
    for _ in range(30):  # an answer at a time
        if (await batch_of(keyed, "first", batch["id"]))["status"] == "completed":
            break
        keyed.engine.gate.set()
        await asyncio.sleep(0.02)
        keyed.engine.gate.clear()
        await asyncio.sleep(0.05)
    tenants = [request.tenant for request in keyed.engine.requests]
    assert name_of("first") in tenants[:20], "the line of the other key is among the next"
    keyed.engine.gate.set()
    await ended(keyed, "first", batch["id"])
