"""A --batch-dir that cannot be written: the error, which clients must not repeat."""

from __future__ import annotations

import errno
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

from server.batch.files import Upload
from tests.support.fake_engine import FakeEngine
from tests.support.rig import eventually, serving

LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}\n'
FULL = (400, "storage_full")
BROKEN = (500, "storage_failed")
NUMBERS = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EROFS: BROKEN,
    errno.EIO: BROKEN,
    errno.EFBIG: BROKEN,
    errno.ENAMETOOLONG: BROKEN,
    errno.ETIMEDOUT: BROKEN,  # a TimeoutError, as a late body is
}


@pytest.mark.variants(15)
@pytest.mark.parametrize("number", NUMBERS, ids=errno.errorcode.get)
@pytest.mark.parametrize("operation", ["begin", "write", "upload", "create", "cancel", "delete"])
async def test_operation_on_a_disk_that_fails_is_tried_once(
    model: Path, tmp_path: Path, says: Any, monkeypatch: Any, operation: str, number: int
) -> None:
    sent: list[str] = []

    async def count(request: httpx2.Request) -> None:
        sent.append(request.method)

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    engine = FakeEngine(says("Hello!"))
    engine.gate.clear()
    async with (
        serving(engine, model, batch_dir=str(tmp_path)) as served,
        httpx2.AsyncClient(event_hooks={"request": [count]}) as http,
    ):
        client = served.openai.with_options(http_client=http, max_retries=2)

        async def upload(size: int = len(LINE)) -> openai.types.FileObject:
            return await client.files.create(file=("in.jsonl", LINE.ljust(size)), purpose="batch")

        async def create(file_id: str) -> openai.types.Batch:
            return await client.batches.create(
                input_file_id=file_id, endpoint="/v1/completions", completion_window="24h"
            )

        file, unused = await upload(), await upload()
        batch = await create(file.id)
        sent.clear()
        calls: dict[str, Callable[[], Awaitable[object]]] = {
            "begin": lambda: upload(20 << 20),  # the client still sends when the disk fails
            "write": lambda: upload(20 << 20),
            "upload": upload,
            "create": lambda: create(file.id),
            "cancel": lambda: client.batches.cancel(batch.id),
            "delete": lambda: client.files.delete(unused.id),
        }
        fails = {
            "begin": (Upload, "__init__"),
            "write": (Upload, "write"),
            "delete": (os, "unlink"),
        }
        with monkeypatch.context() as patch:
            patch.setattr(*fails.get(operation, (os, "fsync")), fail)
            with pytest.raises(openai.APIStatusError) as raised:
                await calls[operation]()
        assert (raised.value.status_code, raised.value.code) == NUMBERS[number]
        assert len(sent) == 1, "the client has repeated the request"
        assert str(tmp_path) not in raised.value.message
        assert (await upload()).bytes == len(LINE)


async def test_conflicts_with_a_batch_are_not_repeated(
    model: Path, tmp_path: Path, says: Any
) -> None:
    engine = FakeEngine(says("Hello!"))
    engine.gate.clear()
    async with serving(engine, model, batch_dir=str(tmp_path)) as served:
        file = await served.openai.files.create(file=("in.jsonl", LINE), purpose="batch")
        batch = await served.openai.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        held = await served.http.delete(f"/v1/files/{file.id}")
        engine.gate.set()
        stored = served.app.state.batches.storage.batches
        await eventually(lambda: not stored.unfinished(), "the batch has ended")
        ended = await served.http.post(f"/v1/batches/{batch.id}/cancel")
    for response, code in ((held, "file_in_use"), (ended, "batch_ended")):
        assert (response.status_code, response.json()["error"]["code"]) == (409, code)
        assert response.headers["x-should-retry"] == "false"
