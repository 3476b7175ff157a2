"""Writes of --batch-dir that fail after others have succeeded: the API shows what is stored."""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.server.batch.test_batch_routes import create, ended, jsonl, line, results
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, eventually, serving

CONTENT = jsonl(line("a"))
FILE = ("in.jsonl", CONTENT)


class Disk:
    """Lets one kind of write fail with ENOSPC."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.refuses = ""  # "folders": their sync; otherwise the last part of a path to open
        self.keeps = ""  # a part of the paths that cannot be deleted, as where deletion needs room
        sync, open_descriptor, unlink = os.fsync, os.open, os.unlink

        def fsync(descriptor: int) -> None:
            if self.refuses == "folders" and stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(errno.ENOSPC, "No space left on device")
            sync(descriptor)

        def opened(path: Any, *arguments: Any, **more: Any) -> int:
            if self.refuses and str(path).endswith(self.refuses):
                raise OSError(errno.ENOSPC, "No space left on device")
            return open_descriptor(path, *arguments, **more)

        monkeypatch.setattr(os, "fsync", fsync)

        def unlinked(path: Any, *arguments: Any, **more: Any) -> None:
            if self.keeps and self.keeps in str(path):
                raise OSError(errno.ENOSPC, "No space left on device")
            unlink(path, *arguments, **more)

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "unlink", unlinked)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr("server.batch.runner.RETRY_S", 0.02)
    return Disk(monkeypatch)


def record_of(folder: Path, batch_id: str) -> Any:
    return json.loads((folder / "batches" / f"{batch_id}.json").read_bytes())


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


def bytes_held(served: Served) -> int:
    held: int = served.app.state.batches.storage.folder.used.held("")
    return held


async def test_new_batch_whose_name_cannot_be_synced_leaves_no_record(
    model: Path, says: Any, tmp_path: Path, disk: Disk
) -> None:
    async with serving(FakeEngine(says("x")), model, batch_dir=str(tmp_path)) as served:
        file = await served.openai.files.create(file=FILE, purpose="batch")
        disk.refuses = "folders"
        with pytest.raises(openai.BadRequestError) as refused:
            await served.openai.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        assert refused.value.code == "storage_full"
        assert names(tmp_path / "batches") == []


async def test_upload_whose_name_cannot_be_synced_leaves_no_contents(
    model: Path, says: Any, tmp_path: Path, disk: Disk
) -> None:
    async with serving(FakeEngine(says("x")), model, batch_dir=str(tmp_path)) as served:
        disk.refuses = "folders"
        with pytest.raises(openai.BadRequestError) as refused:
            await served.openai.files.create(file=FILE, purpose="batch")
        assert refused.value.code == "storage_full"
        assert names(tmp_path / "files") == names(tmp_path / "uploads") == []
        assert bytes_held(served) == 0


async def test_cancellation_in_place_is_shown_although_its_folder_cannot_be_synced(
    model: Path, says: Any, tmp_path: Path, disk: Disk
) -> None:
    """The next start reads the record, so the API may not show the old status."""
    engine = FakeEngine(says("x"))
    async with serving(engine, model, batch_dir=str(tmp_path)) as served:
        engine.gate.clear()
        batch = await create(served, CONTENT)
        await eventually(lambda: engine.running, "the line is open")
        disk.refuses = "folders"
        cancelled = await served.openai.batches.cancel(batch.id)
        assert cancelled.status in ("cancelling", "cancelled")
        assert record_of(tmp_path, batch.id)["status"] in ("cancelling", "cancelled")
        disk.refuses = ""
        assert (await ended(served, batch.id)).status in ("cancelled", "failed")


async def test_batch_whose_results_cannot_be_opened_has_failed_with_storage_full(
    model: Path, says: Any, tmp_path: Path, disk: Disk
) -> None:
    engine = FakeEngine(says("x"))
    async with serving(engine, model, batch_dir=str(tmp_path)) as served:
        engine.gate.clear()
        disk.refuses = ".jsonl"
        failed = await ended(served, (await create(served, CONTENT)).id)
        assert failed.status == "failed"
        assert [problem.code for problem in failed.errors.data] == ["storage_full"]
        assert not engine.requests


@pytest.mark.parametrize("number", [0, 1], ids=["no result is a file", "answers are a file"])
async def test_batch_that_fails_at_its_end_has_the_results_that_are_files_and_no_others(
    model: Path, says: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr("server.batch.runner.RETRY_S", 0.02)
    engine = FakeEngine(says("Hello!"))
    async with serving(engine, model, batch_dir=str(tmp_path)) as served:
        engine.gate.clear()
        bad = line("b", max_tokens=-1)
        batch = await create(served, jsonl(line("a"), bad))
        await eventually(lambda: engine.running, "a line is open")
        files = served.app.state.batches.storage.files
        add, added = files.add, []

        async def refuse(file: Any) -> None:
            if len(added) == number:
                raise OSError(errno.ENOSPC, "No space left on device")
            added.append(file.id)
            await add(file)

        monkeypatch.setattr(files, "add", refuse)
        engine.gate.set()
        failed = await ended(served, batch.id)
        assert (failed.status, failed.errors.data[0].code) == ("failed", "storage_full")
        assert [failed.output_file_id, failed.error_file_id] == [*added, None, None][:2]
        assert failed.request_counts.completed == failed.request_counts.failed == 1
        if failed.output_file_id:
            [answer] = await results(served, failed.output_file_id)
            assert answer["custom_id"] == "a"
        runner = served.app.state.batches
        await eventually(lambda: not runner._tasks, "the batch has left nothing to do")
        contents = [path.stem for path in (tmp_path / "files").glob("*.jsonl")]
        assert sorted(contents) == sorted([batch.input_file_id, *added])
        sizes = sum(path.stat().st_size for path in (tmp_path / "files").glob("*.jsonl"))
        assert bytes_held(served) == sizes


async def test_file_whose_contents_cannot_be_deleted_is_gone_and_counted_until_the_next_start(
    model: Path, says: Any, tmp_path: Path, disk: Disk
) -> None:
    """Its record is deleted, so the next start would not show it."""
    store = {"batch_dir": str(tmp_path)}
    async with serving(FakeEngine(says("x")), model, **store) as served:
        file = await served.openai.files.create(file=FILE, purpose="batch")
        disk.keeps = ".jsonl"
        assert (await served.openai.files.delete(file.id)).deleted
        assert (await served.openai.files.list()).data == []
        assert bytes_held(served) == len(CONTENT)
    disk.keeps = ""
    async with serving(FakeEngine(says("x")), model, **store) as served:
        assert (await served.openai.files.list()).data == []
        assert bytes_held(served) == 0
        assert names(tmp_path / "files") == []


async def test_refused_upload_whose_bytes_cannot_be_deleted_is_answered(
    model: Path, says: Any, tmp_path: Path, disk: Disk
) -> None:
    store = {"batch_dir": str(tmp_path), "max_upload_bytes": len(CONTENT), "max_batch_files": 1}
    async with serving(FakeEngine(says("x")), model, **store) as served:
        disk.keeps = "uploads"
        with pytest.raises(openai.APIStatusError) as refused:
            await served.openai.files.create(file=("in.jsonl", CONTENT * 2), purpose="batch")
        assert refused.value.status_code == 413
        disk.keeps = ""
        assert (await served.openai.files.create(file=FILE, purpose="batch")).bytes > 0


async def test_new_batch_runs_although_an_old_one_cannot_be_deleted(
    model: Path, says: Any, tmp_path: Path, disk: Disk
) -> None:
    store = {"batch_dir": str(tmp_path), "max_batch_files": 1}
    async with serving(FakeEngine(says("x")), model, **store) as served:
        foreign = jsonl(line("a", url="/v1/completions"))  # of another endpoint: it fails at once
        old = await create(served, foreign)
        await ended(served, old.id)
        disk.keeps = old.id
        new = await served.openai.batches.create(
            input_file_id=old.input_file_id,
            endpoint="/v1/chat/completions",
            completion_window="24h",
        )
        assert (await ended(served, new.id)).status == "failed"
        shown = await served.openai.batches.list()
        assert {batch.id for batch in shown.data} == {old.id, new.id}
