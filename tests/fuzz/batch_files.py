"""The targets of uploads, and of the lines and results of batches."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

from server.batch.lines import ENDPOINTS, check_input, read_lines, with_priority
from server.batch.results import Results, ResultsError, result_line
from tests.fuzz.mutate import mutate_bytes, mutate_json_bytes
from tests.fuzz.server import served
from tests.fuzz.target import Check, Target

LINE = (
    b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", '
    b'"body": {"prompt": "Hi", "stream": false, "priority": 1}}\n'
)
FORM_HEAD = b'--x\r\nContent-Disposition: form-data; name="'
FORM = (
    FORM_HEAD
    + b'purpose"\r\n\r\nbatch\r\n'
    + FORM_HEAD
    + b'file"; filename="in.jsonl"\r\nContent-Type: text/plain\r\n\r\n'
    + LINE
    + b"\r\n--x--\r\n"
)
RESULT = result_line("a", {"status_code": 200}, None)
FORM_WORDS = [b"\r\n", b"--x", b"--x--", b'"', b";", b"filename*=utf-8''a", b"\0", b"../", b"\n"]


@contextlib.asynccontextmanager
async def form_opened(folder: Path) -> AsyncIterator[Check]:
    async with served(folder, batch_dir=str(folder / "batches")) as (running, tracebacks):

        async def check(data: bytes) -> None:
            headers = {"content-type": "multipart/form-data; boundary=x"}
            answer = await running.http.post("/v1/files", content=data, headers=headers)
            assert answer.status_code in (200, 400), answer.text
            if answer.status_code == 200:
                file = answer.json()["id"]
                assert (await running.http.delete(f"/v1/files/{file}")).status_code == 200
            assert not tracebacks.found, tracebacks.found

        yield check
        used = running.app.state.batches.storage.folder.used
        assert not any(held for _, held in used)


@contextlib.asynccontextmanager
async def batch_opened(folder: Path) -> AsyncIterator[Check]:
    """An input is checked and read as lines, and the same bytes as results of a killed process."""
    path, errors = folder / "in.jsonl", folder / "errors.jsonl"

    async def check(data: bytes) -> None:
        path.write_bytes(data)
        if not check_input(path, ENDPOINTS, len(data)).problems:
            for line in read_lines(path, set(), len(data)):
                assert "priority" in json.loads(with_priority(line, 7))
        with contextlib.suppress(ResultsError):
            Results(path, errors).close()

    yield check


TARGETS = [
    Target("form", lambda: [FORM], partial(mutate_bytes, words=FORM_WORDS), form_opened),
    Target("batch", lambda: [LINE, RESULT], mutate_json_bytes, batch_opened),
]
