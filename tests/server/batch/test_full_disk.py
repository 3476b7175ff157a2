"""Files and batches on a disk without room: what the API says is what is on the disk."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from server.batch import folder as folder_module
from server.batch.folder import SPARE_BYTES, BatchFolder
from tests.server.batch.test_batch_routes import create, ended, jsonl, line, results
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, eventually, serving

DISK_BYTES = 2 << 20
FILE = ("in.jsonl", jsonl(line("a")))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    mounted = tmp_path / "disk"
    mounted.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", mounted]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    yield mounted
    subprocess.run(["umount", "--lazy", mounted], check=True)


def fill(disk: Path, *, leave: int = 0) -> Path:
    """Write a file until about `leave` bytes are free, and return it."""
    filler = disk / "filler"
    usage = os.statvfs(disk)
    size = usage.f_bavail * usage.f_frsize - leave
    filler.write_bytes(b"x" * (size - size % usage.f_frsize))
    return filler


async def shown(served: Served) -> dict[str, Any]:
    """Return the status of each batch, and the names of the files, as the API lists them."""
    batches = await served.openai.batches.list()
    files = await served.openai.files.list()
    return {
        "batches": {batch.id: batch.status for batch in batches.data},
        "files": sorted(file.id for file in files.data),
    }


def storage_of(served: Served) -> Any:
    return served.app.state.batches.storage


async def test_upload_on_a_full_disk_is_refused_and_leaves_nothing(
    model: Path, says: Any, disk: Path
) -> None:
    engine = FakeEngine(says("Hello!"))
    async with serving(engine, model, batch_dir=str(disk / "store")) as served:
        filler = fill(disk)
        for size in (100, 300_000):
            content = jsonl(line("a", user="u" * size))
            with pytest.raises(openai.BadRequestError) as refused:
                await served.openai.files.create(file=("a.jsonl", content), purpose="batch")
            assert refused.value.code == "storage_full"
            assert "disk of --batch-dir is full" in refused.value.message
        assert await shown(served) == {"batches": {}, "files": []}
        assert storage_of(served).folder.used.held("") == 0
        assert os.listdir(disk / "store" / "uploads") == []
        filler.unlink()
        assert (await served.openai.files.create(file=FILE, purpose="batch")).bytes > 0


async def test_batch_that_cannot_be_written_is_no_ghost(model: Path, says: Any, disk: Path) -> None:
    engine = FakeEngine(says("Hello!"))
    async with serving(engine, model, batch_dir=str(disk / "store")) as served:
        file = await served.openai.files.create(file=FILE, purpose="batch")
        filler = fill(disk)
        with pytest.raises(openai.BadRequestError) as refused:
            await served.openai.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
        assert refused.value.code == "storage_full"
        before = await shown(served)
        assert before == {"batches": {}, "files": [file.id]}
        assert not engine.requests
        await served.openai.files.delete(file.id)  # deleting needs no room
        filler.unlink()
    async with serving(engine, model, batch_dir=str(disk / "store")) as served:
        assert await shown(served) == {"batches": {}, "files": []}


async def test_batch_whose_results_fill_the_disk_has_failed_also_after_a_restart(
    model: Path, says: Any, disk: Path
) -> None:
    engine = FakeEngine(says("Hello! " * 60))
    store = {"batch_dir": str(disk / "store")}
    async with serving(engine, model, **store) as served:
        engine.gate.clear()
        batch = await create(served, jsonl(*(line(str(place)) for place in range(2000))))
        await eventually(lambda: engine.running, "lines are open")
        fill(disk, leave=20_000)
        engine.gate.set()
        failed = await ended(served, batch.id)
        assert failed.status == "failed"
        [problem] = failed.errors.data
        assert problem.code == "storage_full"
        answers = await results(served, failed.output_file_id)
        assert 0 < len(answers) == failed.request_counts.completed
        before = await shown(served)
    async with serving(engine, model, **store) as served:
        again = await served.openai.batches.retrieve(batch.id)
        assert again == failed
        assert await shown(served) == before
        assert await results(served, failed.output_file_id) == answers


async def test_cancelling_on_a_full_disk_ends_the_batch_also_after_a_restart(
    model: Path, says: Any, disk: Path
) -> None:
    engine = FakeEngine(says("Hello!"))
    store = {"batch_dir": str(disk / "store")}
    async with serving(engine, model, **store) as served:
        engine.gate.clear()
        batch = await create(served, jsonl(*(line(str(place)) for place in range(20))))
        await eventually(lambda: engine.running, "lines are open")
        fill(disk)
        cancelled = await served.openai.batches.cancel(batch.id)
        assert cancelled.status in ("cancelling", "cancelled")
        assert (await ended(served, batch.id)).status == "cancelled"
    async with serving(engine, model, **store) as served:
        assert (await served.openai.batches.retrieve(batch.id)).status == "cancelled"


class FullDisk:
    """Lets records of the folder fail with ENOSPC while `is_full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self._write = folder_module._write_record
        monkeypatch.setattr(folder_module, "_write_record", self)

    def __call__(self, *arguments: Any) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self._write(*arguments)


async def test_end_that_cannot_be_written_is_not_shown_and_tried_again(
    model: Path, says: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the spare, too: `failed` must not become `in_progress` by a restart."""
    disk = FullDisk(monkeypatch)
    monkeypatch.setattr("server.batch.runner.RETRY_S", 0.05)
    engine = FakeEngine(says("Hello!"))
    async with serving(engine, model, batch_dir=str(tmp_path)) as served:
        engine.gate.clear()
        batch = await create(served, jsonl(line("a")))
        await eventually(lambda: engine.running, "the line is open")
        disk.is_full = True
        engine.gate.set()
        await asyncio.sleep(0.5)
        assert (await served.openai.batches.retrieve(batch.id)).status == "in_progress"
        with pytest.raises(openai.BadRequestError) as refused:
            await served.openai.batches.cancel(batch.id)
        assert refused.value.code == "storage_full"
        disk.is_full = False
        failed = await ended(served, batch.id)
        assert (failed.status, failed.errors.data[0].code) == ("failed", "storage_full")


async def test_upload_whose_record_cannot_be_written_gives_its_bytes_back(
    model: Path, says: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = FullDisk(monkeypatch)
    async with serving(FakeEngine(says("x")), model, batch_dir=str(tmp_path)) as served:
        disk.is_full = True
        with pytest.raises(openai.BadRequestError) as refused:
            await served.openai.files.create(file=FILE, purpose="batch")
        assert refused.value.code == "storage_full"
        assert storage_of(served).folder.used.held("") == 0
        assert os.listdir(tmp_path / "files") == []


def test_spare_is_kept_used_and_kept_again(disk: Path) -> None:
    folder = BatchFolder(disk / "store", 1 << 30)
    spare = disk / "store" / "spare"
    assert spare.stat().st_blocks * 512 >= SPARE_BYTES
    filler = fill(disk)
    record = folder_module.msgspec.defstruct("Any", [("text", str)])("x" * 9000)
    with pytest.raises(folder_module.StoreFull):
        folder.save(folder.batches, "new", record)
    assert spare.exists()
    assert os.listdir(folder.batches) == []
    folder.save(folder.batches, "old", record, uses_spare=True)
    assert os.listdir(folder.batches) == ["old.json"]
    assert not spare.exists()
    filler.unlink()
    folder.save(folder.batches, "new", record)
    assert spare.stat().st_blocks * 512 >= SPARE_BYTES
    folder.close()
