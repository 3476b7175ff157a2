"""The target of --batch-dir: operations and restarts on a disk whose writes fail."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

from tests.fuzz.mutate import mutate_bytes
from tests.fuzz.server import Tracebacks, hello_engine, logged
from tests.fuzz.target import Check, Target
from tests.support.fake_engine import FakeEngine
from tests.support.rig import Served, serving

MAX_OPERATIONS = 24
LINE = b'{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi"}}\n'
CONTENTS = (LINE, LINE + LINE.replace(b'"a"', b'"b"'), b"no line\n", LINE * 2, LINE.ljust(20_000))
OPERATIONS = ("upload", "create", "cancel", "delete", "fail", "full", "pause", "restart")
FREQUENCIES = (3, 3, 1, 1, 3, 1, 1, 1)
FREE = -1  # writes before one fails: no write fails
SETTLED_S = 8.0
POLL_S = 0.004


def operation(name: str, argument: int = 0) -> int:
    """Return the byte of an operation. `argument` chooses its object, below 32."""
    return OPERATIONS.index(name) + len(OPERATIONS) * argument


def seeds() -> list[bytes]:
    lines = [
        "upload create restart",
        "upload create cancel delete delete",
        "upload pause create restart pause restart",
        "upload fail create fail upload fail create",
        "upload full create upload full create restart",
        "upload pause create full pause cancel full",
        "upload create upload create delete delete delete restart",
    ]
    return [bytes(operation(name) for name in line.split()) for line in lines]


def mutate(random: Random, data: bytes) -> bytes:
    """Change some operations, or choose all of them, most often those that write."""
    if random.random() < 0.4:
        chosen = random.choices(OPERATIONS, FREQUENCIES, k=random.randrange(4, MAX_OPERATIONS))
        return bytes(operation(name, random.randrange(12)) for name in chosen)
    words = [bytes([operation("fail", count), random.randrange(4)]) for count in range(12)]
    changed = mutate_bytes(random, data, words)
    start = random.randrange(max(1, len(changed) - MAX_OPERATIONS))
    return changed[start : start + MAX_OPERATIONS]


class SmallFile(io.FileIO):
    """A file on a SmallDisk."""

    def __init__(self, path: Path, mode: str, take: Callable[[], None]) -> None:
        self._take = take
        super().__init__(path, mode)

    def write(self, data: Any) -> int:
        self._take()
        return super().write(data)


class SmallDisk:
    """Lets the writes below a folder fail with ENOSPC: one of the next ones, or all.

    Deletion needs no room.
    """

    def __init__(self, folder: Path) -> None:
        self.is_full = False
        self.writes_left = FREE
        self.refusals = 0
        self._folder = folder

    def take(self) -> None:
        """Count a write. Raises OSError if it fails."""
        fails = self.is_full or self.writes_left == 0
        if self.writes_left != FREE:
            self.writes_left -= 1
        if fails:
            self.refusals += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @contextlib.contextmanager
    def mounted(self) -> Iterator[None]:
        """Let all writes of this process pass the disk."""
        open_file, open_descriptor = io.open, os.open

        def checked(call: Callable[..., Any]) -> Callable[..., Any]:
            def write(file: Any, *arguments: Any) -> Any:
                if self._holds(file):
                    self.take()
                return call(file, *arguments)

            return write

        def small_open(path: Any, mode: str = "r", *arguments: Any, **more: Any) -> Any:
            if mode not in ("wb", "xb") or not self._holds(path):
                return open_file(path, mode, *arguments, **more)
            self.take()
            return io.BufferedWriter(SmallFile(path, mode, self.take))

        def small_descriptor(path: Any, flags: int, *arguments: Any, **more: Any) -> int:
            if flags & os.O_CREAT and self._holds(path) and not os.path.exists(path):
                self.take()
            return open_descriptor(path, flags, *arguments, **more)

        with contextlib.ExitStack() as stack:
            for name in ("fsync", "rename", "write", "posix_fallocate"):
                stack.enter_context(patch.object(os, name, checked(getattr(os, name))))
            stack.enter_context(patch.object(os, "open", small_descriptor))
            stack.enter_context(patch.object(io, "open", small_open))
            yield

    def _holds(self, file: Any) -> bool:
        """Whether a path or an open descriptor is below the folder."""
        path = os.readlink(f"/proc/self/fd/{file}") if isinstance(file, int) else file
        return Path(path).is_relative_to(self._folder)


@dataclass
class Shown:
    """The files with their bytes, and the batches with their status."""

    files: dict[str, int] = field(default_factory=dict)
    batches: dict[str, str] = field(default_factory=dict)


async def shown(running: Served) -> Shown:
    files = (await running.http.get("/v1/files?limit=1000")).json()["data"]
    batches = (await running.http.get("/v1/batches?limit=100")).json()["data"]
    return Shown(
        {file["id"]: file["bytes"] for file in files},
        {batch["id"]: batch["status"] for batch in batches},
    )


def stored(folder: Path) -> Shown:
    found = Shown()
    for path in (folder / "files").glob("*.json"):
        found.files[path.stem] = path.with_suffix(".jsonl").stat().st_size
    for path in (folder / "batches").glob("*.json"):
        found.batches[path.stem] = json.loads(path.read_bytes())["status"]
    return found


class Session:
    """One input: its operations on a store, and the comparison after each of them."""

    def __init__(self, folder: Path, disk: SmallDisk, tracebacks: Tracebacks) -> None:
        self.restarts = False
        self._folder = folder
        self._disk = disk
        self._tracebacks = tracebacks
        self._deleted: set[str] = set()

    async def perform(self, running: Served, name: str, argument: int) -> None:
        """Perform an operation, and compare the API with the disk."""
        disk, gate = self._disk, running.engine.gate
        match name:
            case "fail":
                disk.writes_left = argument
            case "full":
                disk.is_full = not disk.is_full
            case "pause" if gate.is_set():
                gate.clear()
            case "pause":
                gate.set()
            case "restart":
                self.restarts = True
            case _:
                await self._request(running, name, argument)
        await self.compare(running)

    async def _request(self, running: Served, name: str, argument: int) -> None:
        http, before = running.http, self._disk.refusals
        now = await shown(running)
        objects = list(now.batches if name == "cancel" else now.files)
        if name != "upload" and not objects:
            return
        chosen = objects[argument % len(objects)] if objects else ""
        match name:
            case "upload":
                content = CONTENTS[argument % len(CONTENTS)]
                form = {"purpose": "batch"}
                answer = await http.post("/v1/files", data=form, files={"file": ("a", content)})
            case "create":
                body = {"input_file_id": chosen, "endpoint": "/v1/completions"}
                answer = await http.post("/v1/batches", json={**body, "completion_window": "24h"})
            case "cancel":
                answer = await http.post(f"/v1/batches/{chosen}/cancel")
            case _:
                answer = await http.delete(f"/v1/files/{chosen}")
        assert answer.status_code in (200, 400, 404, 409), answer.text
        if name == "delete" and answer.status_code == 200:
            self._deleted.add(chosen)
        if answer.status_code == 400:
            assert answer.json()["error"]["code"] == "storage_full", answer.text
            assert self._disk.refusals > before, "storage_full, and no write has failed"

    async def compare(self, running: Served, *, ended: bool = False) -> None:
        """Check that the API shows what is stored, with all batches `ended` if that is wanted."""
        runner = running.app.state.batches
        for _ in range(int(SETTLED_S / POLL_S)):
            api, disk = await shown(running), stored(self._folder)
            if api == disk and not (ended and runner._tasks):
                break
            await asyncio.sleep(POLL_S)
        else:
            raise AssertionError(f"the API has {api}, the disk {disk}, {runner._tasks} run")
        assert not os.listdir(self._folder / "uploads")
        assert not self._tracebacks.found, self._tracebacks.found
        if not runner._tasks:
            held = runner.storage.folder.used.held("")
            contents = list((self._folder / "files").glob("*.jsonl"))
            assert {path.stem for path in contents} == disk.files.keys()
            assert held == sum(disk.files.values()), f"{held} bytes are counted"

    async def check_whole(self, running: Served) -> None:
        """Check that all batches end once there is room, and that the files they name exist."""
        self._disk.is_full, self._disk.writes_left = False, FREE
        running.engine.gate.set()
        await self.compare(running, ended=True)
        batches = (await running.http.get("/v1/batches?limit=100")).json()["data"]
        files = (await shown(running)).files
        for batch in batches:
            assert batch["status"] in ("completed", "failed", "cancelled"), batch
            for name in ("output_file_id", "error_file_id"):
                assert batch.get(name) in {None, *files, *self._deleted}, batch
        for file, size in files.items():
            content = (await running.http.get(f"/v1/files/{file}/content")).content
            assert len(content) == size
            for batch in batches:
                if batch.get("output_file_id") == file:
                    assert content.count(b"\n") == batch["request_counts"]["completed"]


@contextlib.contextmanager
def without_log() -> Iterator[None]:
    """Drop the log of servers: it has a line for each refusal."""
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
        yield


@contextlib.asynccontextmanager
async def opened(folder: Path) -> AsyncIterator[Check]:
    from tests.server.conftest import write_model

    model = write_model(folder / "tiny")
    store = folder / "store"
    fields = {"batch_dir": str(store), "log_level": "error"}

    async def run(engine: FakeEngine, session: Session, operations: list[int]) -> None:
        """Perform operations until the next restart, or to the end."""
        async with serving(engine, model, **fields) as running:
            await session.compare(running)
            while operations and not session.restarts:
                argument, place = divmod(operations.pop(0), len(OPERATIONS))
                await session.perform(running, OPERATIONS[place], argument)
            if not operations:
                await session.check_whole(running)

    with (
        without_log(),
        logged() as tracebacks,
        patch("server.batch.runner.RETRY_S", 0.01),
    ):

        async def check(data: bytes) -> None:
            disk = SmallDisk(store)
            session = Session(store, disk, tracebacks)
            operations = list(data[:MAX_OPERATIONS])
            try:
                with disk.mounted():
                    while operations:
                        session.restarts = False
                        await run(hello_engine(), session, operations)
                    await run(hello_engine(), session, operations)
            finally:
                tracebacks.found.clear()
                shutil.rmtree(store, ignore_errors=True)

        yield check


TARGET = Target("batches", seeds, mutate, opened, least=4)  # each is a server with restarts
