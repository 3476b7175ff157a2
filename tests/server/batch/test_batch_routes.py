"""/v1/batches with the official client: states, results, restarts, and lines that cannot run."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.errors import ConfigError
from engine.protocol.outputs import EngineStats
from server.batch.results import Results
from server.generation.limits import LAST_PRIORITY
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, eventually, serving

CHAT = "/v1/chat/completions"


@pytest.fixture
async def store(model: Path, tmp_path: Path, says: Any) -> AsyncIterator[Served]:
    async with serving(FakeEngine(says("Hello!")), model, batch_dir=str(tmp_path)) as served:
        yield served


def line(custom_id: str, url: str = CHAT, **body: Any) -> dict[str, Any]:
    fields = {"messages": [{"role": "user", "content": "Hi"}], **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": fields}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in lines)


async def create(served: Served, content: bytes, endpoint: Any = CHAT, **more: Any) -> Any:
    file = await served.openai.files.create(file=("in.jsonl", content), purpose="batch")
    return await served.openai.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **more
    )


async def ended(served: Served, batch_id: str) -> Any:
    async with asyncio.timeout(20):
        while True:
            batch = await served.openai.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "cancelled", "expired"):
                return batch
            await asyncio.sleep(0.01)


async def results(served: Served, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    text = (await served.openai.files.content(file_id)).text
    return [json.loads(each) for each in text.splitlines()]


async def test_batch_answers_each_line_once_and_sorts_failures_out(store: Served) -> None:
    lines = [line(f"id-{place}") for place in range(20)]
    lines.append(line("bad", temperature=-1))
    batch = await create(store, jsonl(*lines), metadata={"a": "b"})
    assert batch.status == "validating"
    done = await ended(store, batch.id)
    assert done.status == "completed"
    assert (done.request_counts.total, done.request_counts.completed) == (21, 20)
    assert done.request_counts.failed == 1
    assert done.metadata == {"a": "b"}
    assert done.created_at <= done.in_progress_at <= done.finalizing_at <= done.completed_at
    output = await results(store, done.output_file_id)
    assert sorted(each["custom_id"] for each in output) == sorted(f"id-{n}" for n in range(20))
    for each in output:
        assert each["error"] is None
        assert each["response"]["status_code"] == 200
        assert each["response"]["request_id"].startswith("req_")
        body = each["response"]["body"]
        assert body["choices"][0]["message"]["content"] == "Hello!"
    [failed] = await results(store, done.error_file_id)
    assert failed["custom_id"] == "bad"
    assert failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    file = await store.openai.files.retrieve(done.output_file_id)
    assert file.purpose == "batch_output"


async def test_batch_lines_have_the_last_priority_unless_they_name_one(store: Served) -> None:
    batch = await create(store, jsonl(line("a"), line("b", priority=-5)))
    await ended(store, batch.id)
    found = sorted(request.priority for request in store.engine.requests)
    assert found == [-5, LAST_PRIORITY]


async def test_batch_waits_while_other_requests_wait(store: Served) -> None:
    store.engine.stats = EngineStats(waiting=3)
    batch = await create(store, jsonl(line("a")))
    await asyncio.sleep(0.3)
    assert not store.engine.requests
    store.engine.stats = EngineStats()
    assert (await ended(store, batch.id)).status == "completed"


async def test_batch_takes_at_most_half_of_the_engine(store: Served) -> None:
    store.engine.gate.clear()
    batch = await create(store, jsonl(*(line(str(place)) for place in range(20))))
    await asyncio.sleep(0.3)
    assert len(store.engine.running) == 4  # of 8 sequences
    store.engine.gate.set()
    assert (await ended(store, batch.id)).request_counts.completed == 20


async def test_batch_refused_by_a_full_queue_is_retried_not_reported(
    store: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.sender.LONGEST_WAIT_S", 0.1)  # the server asks for 7 s
    store.engine.overloaded = True
    batch = await create(store, jsonl(line("a")))
    await asyncio.sleep(0.3)
    assert (await store.openai.batches.retrieve(batch.id)).status == "in_progress"
    store.engine.overloaded = False
    done = await ended(store, batch.id)
    assert (done.request_counts.completed, done.request_counts.failed) == (1, 0)


BAD = {
    "not json": (b"{", "invalid_json_line", None),
    "not utf-8": (b'"\xff"', "invalid_json_line", None),
    "deep": (b'{"body":' + b"[" * 99999, "invalid_json_line", None),
    "list": (b"[]", "invalid_request", None),
    "no custom_id": (b'{"method":"POST","url":"/v1/x","body":{}}', "invalid_request", "custom_id"),
    "number": (
        b'{"custom_id":1,"method":"POST","url":"/v1/x","body":{}}',
        "invalid_request",
        "custom_id",
    ),
    "method": (jsonl(line("a") | {"method": "GET"}), "invalid_request", "method"),
    "url": (jsonl(line("a", "/v1/completions")), "invalid_url", "url"),
    "foreign url": (jsonl(line("a", "http://example.com/v1")), "invalid_url", "url"),
    "path": (jsonl(line("a", "/v1/../metrics")), "invalid_url", "url"),
    "body": (jsonl(line("a") | {"body": []}), "invalid_request", "body"),
    "stream": (jsonl(line("a", stream=True)), "invalid_request", "body.stream"),
    "twice": (jsonl(line("ok")), "duplicate_custom_id", "custom_id"),
}


@pytest.mark.parametrize("case", BAD)
async def test_batch_with_a_bad_line_fails_and_names_the_line(store: Served, case: str) -> None:
    bad, code, param = BAD[case]
    batch = await create(store, jsonl(line("ok")) + b"\n" + bad)
    done = await ended(store, batch.id)
    assert done.status == "failed"
    [error] = done.errors.data
    assert (error.line, error.code, error.param) == (3, code, param)
    assert not store.engine.requests


async def test_batch_without_lines_fails(store: Served) -> None:
    done = await ended(store, (await create(store, b"\n \n")).id)
    assert done.errors.data[0].code == "empty_file"


async def test_batch_with_a_long_line_fails(model: Path, tmp_path: Path, says: Any) -> None:
    flags: dict[str, Any] = {"batch_dir": str(tmp_path), "max_body_bytes": 2048}
    async with serving(FakeEngine(says("Hello!")), model, **flags) as served:
        done = await ended(served, (await create(served, jsonl(line("a", user="x" * 9999)))).id)
        assert done.errors.data[0].code == "line_too_long"


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"endpoint": "/v1/files"}, 400, "endpoint"),
        ({"completion_window": "1h"}, 400, "completion_window"),
        ({"input_file_id": "file-x"}, 404, "input_file_id"),
        ({"metadata": {str(n): "" for n in range(17)}}, 400, "metadata"),
        ({"metadata": {"a": "x" * 513}}, 400, "metadata.a"),
        ({"model": "other"}, 404, "model"),
        (
            {"output_expires_after": {"anchor": "created_at", "seconds": 1}},
            400,
            "output_expires_after.seconds",
        ),
    ],
)
async def test_batch_with_a_bad_field_is_refused_by_name(
    store: Served, fields: dict[str, Any], status: int, param: str
) -> None:
    file = await store.openai.files.create(file=("in.jsonl", jsonl(line("a"))), purpose="batch")
    body = {"input_file_id": file.id, "endpoint": CHAT, "completion_window": "24h", **fields}
    response = await store.http.post("/v1/batches", json=body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


async def test_cancelled_batch_keeps_its_results_and_names_the_other_lines(store: Served) -> None:
    batch = await create(store, jsonl(*(line(str(place)) for place in range(50))))
    engine = store.engine
    engine.step_listeners = [lambda _: engine.gate.clear() if len(engine.requests) > 20 else None]
    await eventually(lambda: len(engine.requests) > 20, "some lines are sent")
    cancelled = await store.openai.batches.cancel(batch.id)
    assert cancelled.status in ("cancelling", "cancelled")  # if the disk is slow, already the end
    assert cancelled.cancelling_at is not None
    done = await ended(store, batch.id)
    assert done.status == "cancelled"
    output = await results(store, done.output_file_id)
    errors = await results(store, done.error_file_id)
    ids = Counter(each["custom_id"] for each in output + errors)
    assert ids == Counter(map(str, range(50)))
    assert {each["error"]["code"] for each in errors} == {"batch_cancelled"}
    assert not store.engine.running
    with pytest.raises(openai.ConflictError):
        await store.openai.batches.cancel(batch.id)


async def test_batch_expires_after_its_window(
    store: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.batch.batches.WINDOW_S", 0.3)
    store.engine.gate.clear()
    done = await ended(store, (await create(store, jsonl(line("a"), line("b")))).id)
    assert done.status == "expired"
    errors = await results(store, done.error_file_id)
    assert [each["error"]["code"] for each in errors] == ["batch_expired"] * 2
    assert done.output_file_id is None


async def test_batch_whose_results_fill_the_store_fails_with_those_so_far(
    model: Path, tmp_path: Path, says: Any
) -> None:
    flags: dict[str, Any] = {"batch_dir": str(tmp_path), "max_batch_dir_bytes": 8000}
    async with serving(FakeEngine(says("Hello!")), model, **flags) as served:
        batch = await create(served, jsonl(*(line(str(place)) for place in range(20))))
        done = await ended(served, batch.id)
        assert done.status == "failed"
        assert done.errors.data[0].code == "storage_full"
        output = await results(served, done.output_file_id)
        assert 0 < len(output) == done.request_counts.completed < 20


async def test_input_of_a_running_batch_cannot_be_deleted(store: Served) -> None:
    store.engine.gate.clear()
    batch = await create(store, jsonl(line("a")))
    with pytest.raises(openai.ConflictError):
        await store.openai.files.delete(batch.input_file_id)
    store.engine.gate.set()
    await ended(store, batch.id)
    await store.openai.files.delete(batch.input_file_id)


async def test_restart_resumes_batches_with_each_line_once(
    model: Path, tmp_path: Path, says: Any
) -> None:
    engine = FakeEngine(says("Hello!"))

    def stop_amid(_: Any) -> None:
        if len(engine.requests) > 20:
            engine.drain()
            engine.gate.clear()

    engine.step_listeners = [stop_amid]
    async with serving(engine, model, batch_dir=str(tmp_path)) as served:
        batch = await create(served, jsonl(*(line(str(place)) for place in range(60))))
        await eventually(lambda: len(engine.requests) > 20, "some lines are sent")
    assert 0 < len(engine.requests) < 60
    paths = (tmp_path / "files").glob("*.jsonl")
    [output_path] = [path for path in paths if path.read_bytes().startswith(b'{"id"')]
    with output_path.open("ab") as file:
        file.write(b'{"id":"batch_req_torn","custom_')
    async with serving(FakeEngine(says("Hello!")), model, batch_dir=str(tmp_path)) as served:
        done = await ended(served, batch.id)
        assert done.status == "completed"
        output = await results(served, done.output_file_id)
    assert Counter(each["custom_id"] for each in output) == Counter(map(str, range(60)))


async def test_restart_amid_the_write_of_a_record_completes_the_batch(
    model: Path, tmp_path: Path, says: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk is slow: the server stops before the record of the stop is in place."""
    engine = FakeEngine(says("Hello!"))
    engine.step_listeners = [lambda _: engine.drain() if len(engine.requests) > 20 else None]
    first, second = threading.Event(), threading.Event()
    rename = Path.rename

    def renamed(path: Path, target: Path) -> Path:
        if engine.state == "draining" and not first.is_set():
            first.set()
            second.wait(1)  # until the next server writes the same record, if it can
        elif first.is_set() and not second.is_set():
            second.set()
            time.sleep(0.2)
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", renamed)
    async with serving(engine, model, batch_dir=str(tmp_path)) as served:
        batch = await create(served, jsonl(*(line(str(place)) for place in range(60))))
        await eventually(first.is_set, "the stop is being recorded")
    async with serving(FakeEngine(says("Hello!")), model, batch_dir=str(tmp_path)) as served:
        done = await ended(served, batch.id)
        assert (done.status, done.errors) == ("completed", None)


async def test_restart_while_results_are_opened_completes_the_batch(
    model: Path, tmp_path: Path, says: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server stops while a thread reads the results so far, which locks their files."""
    first, opened = threading.Event(), threading.Event()
    begin = Results.__init__

    def slowly(results: Results, *files: Any) -> None:
        is_first = not first.is_set()
        first.set()
        if is_first:
            time.sleep(0.3)
        else:
            opened.wait(1)
        begin(results, *files)
        opened.set()

    monkeypatch.setattr(Results, "__init__", slowly)
    async with serving(FakeEngine(says("Hello!")), model, batch_dir=str(tmp_path)) as served:
        batch = await create(served, jsonl(line("a")))
        await eventually(first.is_set, "the results are being opened")
    async with serving(FakeEngine(says("Hello!")), model, batch_dir=str(tmp_path)) as served:
        done = await ended(served, batch.id)
        assert (done.status, done.errors) == ("completed", None)


async def test_batch_that_ends_the_engine_at_each_start_fails(
    model: Path, tmp_path: Path, says: Any
) -> None:
    batch_id = ""
    for _ in range(3):
        engine = FakeEngine(says("Hello!"))
        engine.gate.clear()
        async with serving(engine, model, batch_dir=str(tmp_path)) as served:
            if not batch_id:
                batch_id = (await create(served, jsonl(line("poison")))).id
            await eventually(lambda: bool(engine.running), "the line is sent")  # noqa: B023
            engine.die()
    async with serving(FakeEngine(says("Hello!")), model, batch_dir=str(tmp_path)) as served:
        done = await ended(served, batch_id)
    assert done.status == "failed"
    assert done.errors.data[0].code == "no_progress"


async def test_batches_of_two_keys_are_apart_and_share_the_engine(
    model: Path, tmp_path: Path, says: Any
) -> None:
    keys = ("one", "two")
    engine = FakeEngine(says("Hello!"))
    async with serving(engine, model, "one", api_key=keys, batch_dir=str(tmp_path)) as served:
        batch = await create(served, jsonl(line("a")))
        other = served.openai.with_options(api_key="two")
        with pytest.raises(openai.NotFoundError):
            await other.batches.retrieve(batch.id)
        with pytest.raises(openai.NotFoundError):
            await other.batches.cancel(batch.id)
        assert not (await other.batches.list()).data
        assert (await ended(served, batch.id)).status == "completed"
        [request] = engine.requests
        assert request.salt  # the owner's prefixes, not those of all


async def test_list_of_batches_is_paged(store: Served) -> None:
    made = [(await create(store, jsonl(line("a")))).id for _ in range(3)]
    assert [batch.id async for batch in store.openai.batches.list(limit=2)] == made[::-1]


async def test_second_server_in_the_same_folder_is_refused(
    store: Served, model: Path, tmp_path: Path, says: Any
) -> None:
    with pytest.raises(ConfigError, match="another server"):
        async with serving(FakeEngine(says("Hello!")), model, batch_dir=str(tmp_path)):
            pass
