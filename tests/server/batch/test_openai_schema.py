"""Files and batches against OpenAI's own schemas."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import FakeEngine
from tests.support.openai_spec import OpenAISpec, check_every_fault_is_seen
from tests.support.rig import Served, serving

LINE = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.fixture
async def store(model: Path, tmp_path: Path, says: Any) -> AsyncIterator[Served]:
    async with serving(FakeEngine(says("Hello!")), model, batch_dir=str(tmp_path)) as running:
        yield running


async def upload(served: Served, content: bytes, **fields: str) -> Any:
    form = {"purpose": "batch", **fields}
    response = await served.http.post("/v1/files", data=form, files={"file": ("a", content)})
    assert response.status_code == 200, response.text
    return response.json()


async def create_batch(served: Served, file_id: str, **fields: Any) -> Any:
    body = {"input_file_id": file_id, "endpoint": LINE["url"], "completion_window": "24h"}
    response = await served.http.post("/v1/batches", json={**body, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_files_have_the_schema(store: Served, spec: OpenAISpec) -> None:
    expiry = {"expires_after[anchor]": "created_at", "expires_after[seconds]": "3600"}
    spec.check("ListFilesResponse", (await store.http.get("/v1/files")).json())
    plain = await upload(store, b"{}\n")
    expiring = await upload(store, b"{}\n", **expiry)
    assert "expires_at" in expiring
    for file in (plain, expiring, (await store.http.get(f"/v1/files/{plain['id']}")).json()):
        spec.check("OpenAIFile", file)
        check_every_fault_is_seen(spec, "OpenAIFile", file)
    listed = (await store.http.get("/v1/files")).json()
    assert len(listed["data"]) == 2
    spec.check("ListFilesResponse", listed)
    deleted = await store.http.delete(f"/v1/files/{plain['id']}")
    spec.check("DeleteFileResponse", deleted.json())


async def test_completed_batch_has_the_schema_in_each_state(
    store: Served, spec: OpenAISpec
) -> None:
    spec.check("ListBatchesResponse", (await store.http.get("/v1/batches")).json())
    refused = {**LINE, "custom_id": "b", "body": {"messages": []}}
    lines = b"".join(json.dumps(line).encode() + b"\n" for line in (LINE, refused))
    file = await upload(store, lines)
    states = [await create_batch(store, file["id"], metadata={"a": "b"})]
    while states[-1]["status"] != "completed":
        states.append((await store.http.get(f"/v1/batches/{states[0]['id']}")).json())
    assert states[-1]["output_file_id"]
    assert states[-1]["error_file_id"]
    for state in states:
        spec.check("Batch", state)
    check_every_fault_is_seen(spec, "Batch", states[-1])
    listed = (await store.http.get("/v1/batches")).json()
    assert len(listed["data"]) == 1
    spec.check("ListBatchesResponse", listed)
    spec.check("ListFilesResponse", (await store.http.get("/v1/files")).json())


async def test_cancelled_and_failed_batches_have_the_schema(
    store: Served, spec: OpenAISpec
) -> None:
    store.engine.gate.clear()
    file = await upload(store, json.dumps(LINE).encode())
    cancelled = await create_batch(store, file["id"])
    answer = await store.http.post(f"/v1/batches/{cancelled['id']}/cancel")
    spec.check("Batch", answer.json())
    store.engine.gate.set()
    failed = await create_batch(store, (await upload(store, b"no line\n"))["id"])
    ends: list[Any] = []
    for batch in (cancelled, failed):
        path = f"/v1/batches/{batch['id']}"
        for _ in range(1000):
            found = (await store.http.get(path)).json()
            spec.check("Batch", found)
            if found["status"] in ("cancelled", "failed"):
                break
        ends.append(found)
    assert [end["status"] for end in ends] == ["cancelled", "failed"]
    assert ends[1]["errors"]["data"]
