"""BatchRunner: runs the stored batches inside the server, behind its other requests."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import httpx2
import msgspec
import structlog
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.client.interface import EngineClient
from engine.errors import EngineError
from server.batch.batches import WINDOW_S, BatchRecord, Status
from server.batch.executor import refuse_lines, run_lines
from server.batch.files import OUTPUT, StoredFile
from server.batch.folder import StoreFull, needs_room
from server.batch.lines import (
    BatchLine,
    LineProblem,
    check_input,
    read_lines,
    with_priority,
)
from server.batch.results import Results, ResultsError
from server.batch.slots import LineSlots
from server.batch.storage import BatchStorage
from server.batch.threads import in_thread
from server.generation.limits import LAST_PRIORITY
from server.http.auth import INSIDE
from server.sender import Sender, ServerAway
from server.turns import Turns

MOST_RUNNING = 8  # batches at a time; their owners share the slots in turn
FULL_CODE = "storage_full"
RETRY_S = 5.0  # until the end of a batch is written again
LOOK_S = 0.05  # between looks at a busy queue
MOST_STARTS = 3  # without a new result, before a batch counts as the cause of the restarts
UNSENT = {
    "expired": "This request could not be executed before the completion window expired.",
    "cancelled": "The batch was cancelled before this request was executed.",
}

log = structlog.get_logger("server.batches")


def client_inside(app: ASGIApp, tenant: str) -> httpx2.AsyncClient:
    """Return a client that calls `app` in this process, as the owner `tenant`."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, "client": None, INSIDE: tenant}, receive, send)

    transport = httpx2.ASGITransport(call)
    return httpx2.AsyncClient(transport=transport, base_url="http://localhost", timeout=None)


class BatchRunner:
    """Runs every unfinished batch of a storage, at most MOST_RUNNING at a time.

    `start` resumes the batches of an earlier process. `stop` leaves them for the next one.
    `seconds_until_room` returns how long the key of a tenant makes its next request wait.
    """

    def __init__(
        self,
        storage: BatchStorage,
        client: EngineClient,
        max_line_bytes: int,
        seconds_until_room: Callable[[str], float] = lambda tenant: 0.0,
    ) -> None:
        self.storage = storage
        self._batches = storage.batches
        self._client = client
        self._max_line_bytes = max_line_bytes
        self._seconds_until_room = seconds_until_room
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._work: dict[str, asyncio.Task[None]] = {}  # the sending of lines
        self._results: dict[str, Results] = {}
        self._turns = Turns(MOST_RUNNING, leaves_room=True)
        self._validation = asyncio.Lock()
        self._slots: Turns | None = None  # None until the engine is ready
        self._app: ASGIApp

    def start(self, app: ASGIApp) -> None:
        """Send lines to `app` from now on, first those of the unfinished batches."""
        self._app = app
        for batch in self._batches.unfinished():
            self.run(batch)

    def run(self, batch: BatchRecord) -> None:
        """Run one batch in the background."""
        task = asyncio.create_task(self._run(batch.id))
        self._tasks[batch.id] = task
        task.add_done_callback(lambda _: self._forget(batch.id))

    def _forget(self, batch_id: str) -> None:
        del self._tasks[batch_id]
        self._results.pop(batch_id, None)

    async def stop(self) -> None:
        """Stop sending lines. Lines that are open get no result."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def current(self, batch: BatchRecord) -> BatchRecord:
        """Return a batch with the counts of this moment."""
        results = self._results.get(batch.id)
        if results is None:
            return batch
        return msgspec.structs.replace(batch, completed=results.completed, failed=results.failed)

    async def cancel(self, batch: BatchRecord) -> BatchRecord:
        """Cancel a batch that is validating or in progress, and return it.

        A batch that has got further in the meantime is returned as it is. Raises StoreFull or
        OSError; the batch goes on then.
        """
        update = self._batches.update
        batch = await update(batch.id, only_from=("validating",), status="cancelled")
        batch = await update(batch.id, only_from=("in_progress",), status="cancelling")
        work = self._work.get(batch.id)
        if work is not None and batch.status == "cancelling":
            work.cancel()
        return batch

    async def _run(self, batch_id: str) -> None:
        """Run a batch to its end, or until the server or the engine stops."""
        try:
            tenant = self._batches[batch_id].tenant
            turns = await self._ready_slots()
            slots = LineSlots(turns, tenant, lambda: self._seconds_until_room(tenant))
            await self._turns.acquire(tenant)
            try:
                with needs_room():
                    await self._validate(batch_id)
                    if not self._batches[batch_id].is_ended:
                        await self._execute(batch_id, slots)
            finally:
                self._turns.release(tenant)
        except (EngineError, ServerAway) as error:
            log.info("batch waits for the next start", batch=batch_id, cause=str(error))
        except StoreFull as error:
            log.error("batch failed", batch=batch_id, cause=str(error))
            await self._fail(batch_id, FULL_CODE, str(error))
        except Exception as error:
            log.error("batch failed", batch=batch_id, exc_info=error)
            await self._fail(batch_id, "internal_error", "The server's log has the cause.")

    async def _ready_slots(self) -> Turns:
        """Wait for the engine. Half of its sequences are left to other requests."""
        info = await self._client.wait_ready()
        if self._slots is None:
            self._slots = Turns(max(1, info.max_num_seqs // 2))
        return self._slots

    async def _validate(self, batch_id: str) -> None:
        batch = self._batches[batch_id]
        if batch.status != "validating":
            return
        path = self.storage.folder.contents(batch.input_file_id)
        async with self._validation:
            checked = await asyncio.to_thread(
                check_input, path, [batch.endpoint], self._max_line_bytes
            )
        changes: dict[str, Any] = {"status": "in_progress", "total": checked.total}
        if checked.problems:
            changes = {"status": "failed", "problems": checked.problems}
        # It may have been cancelled in the meantime.
        await self._batches.update(batch_id, only_from=("validating",), **changes)

    async def _fail(self, batch_id: str, code: str, message: str) -> None:
        """End a batch, and keep the results that are files by now.

        If this cannot be written, the batch goes on waiting for that.
        """
        batch = self.current(self._batches[batch_id])
        files = self.storage.files
        changes: dict[str, Any] = {
            "problems": [LineProblem(code, message)],
            "completed": batch.completed,
            "failed": batch.failed,
            "output_file_id": batch.output_id if files.has(batch.output_id) else None,
            "error_file_id": batch.error_id if files.has(batch.error_id) else None,
        }
        while True:
            try:
                await self._batches.update(batch_id, status="failed", **changes)
                break
            except (StoreFull, OSError) as error:
                log.error("the end of a batch cannot be written", batch=batch_id, cause=str(error))
            await asyncio.sleep(RETRY_S)
        for file_id in (batch.output_id, batch.error_id):
            files.discard(file_id, batch.tenant)

    async def _execute(self, batch_id: str, slots: LineSlots) -> None:
        """Send the lines that have no result yet, and end the batch. Raises ServerAway."""
        batch = self._batches[batch_id]
        folder = self.storage.folder
        output, errors = folder.contents(batch.output_id), folder.contents(batch.error_id)
        try:
            results = await in_thread(
                lambda: Results(
                    output,
                    errors,
                    partial(folder.reserve, batch.tenant),
                    partial(folder.release, batch.tenant),
                ),
                cancelled_with=Results.close,
            )
        except ResultsError as error:
            await self._fail(batch_id, "results_unreadable", str(error))
            return
        self._results[batch_id] = results
        try:
            outcome = await self._outcome(batch_id, results, slots)
            await self._finish(batch_id, results, outcome)
        except ServerAway:
            if self._client.state == "draining":  # this stop says nothing about the batch
                await self._batches.update(batch_id, starts=0)
            raise
        finally:
            results.close()

    async def _outcome(self, batch_id: str, results: Results, slots: LineSlots) -> Status:
        """Send lines and return the status that the batch ends with. Raises ServerAway."""
        if not await self._count_start(batch_id, results):
            return "failed"
        status = self._batches[batch_id].status
        if status == "cancelling":
            return "cancelled"
        if status == "finalizing":
            return "completed"
        try:
            with needs_room():
                return await self._send_lines(batch_id, results, slots)
        except StoreFull as error:
            await self._note_problem(batch_id, FULL_CODE, str(error))
        return "failed"

    async def _count_start(self, batch_id: str, results: Results) -> bool:
        """Return whether the batch may start again.

        A line that kills the engine would otherwise do so after every restart.
        """
        batch = self._batches[batch_id]
        counts = results.completed, results.failed
        starts = 1 if counts != (batch.completed, batch.failed) else batch.starts + 1
        await self._batches.update(
            batch_id, starts=starts, completed=results.completed, failed=results.failed
        )
        if starts <= MOST_STARTS:
            return True
        text = f"The server ended {MOST_STARTS} times in a row before a line had a result."
        await self._note_problem(batch_id, "no_progress", text)
        return False

    async def _note_problem(self, batch_id: str, code: str, message: str) -> None:
        log.error("batch fails", batch=batch_id, code=code, cause=message)
        await self._batches.update(batch_id, problems=[LineProblem(code, message)])

    async def _send_lines(self, batch_id: str, results: Results, slots: LineSlots) -> Status:
        """Send lines until all have results, the window ends or the batch is cancelled."""
        batch = self._batches[batch_id]
        path = self.storage.folder.contents(batch.input_file_id)
        lines = map(_behind_others, read_lines(path, results.done, self._max_line_bytes))
        async with client_inside(self._app, batch.tenant) as http:
            sender = Sender(http, patience=0, longest_retry=WINDOW_S, room=self._room)
            work = asyncio.create_task(run_lines(lines, results, sender, slots))
            self._work[batch_id] = work
            try:
                await asyncio.wait({work}, timeout=max(0.0, batch.expires_at - time.time()))
            finally:
                del self._work[batch_id]
                work.cancel()
                await asyncio.wait({work})
        if self._batches[batch_id].status == "cancelling":
            return "cancelled"
        if work.cancelled():
            return "expired"
        work.result()  # raises why it ended early
        return "completed"

    async def _room(self) -> None:
        """Wait while requests wait in the engine's queue."""
        while self._client.stats.waiting:  # noqa: ASYNC110 - the engine sends no event for it
            await asyncio.sleep(LOOK_S)

    async def _finish(self, batch_id: str, results: Results, outcome: Status) -> None:
        """Put the results in place as files, and end the batch. Repeated after a crash."""
        batch = self._batches[batch_id]
        if outcome == "completed" and batch.status != "finalizing":
            await self._batches.update(batch_id, status="finalizing")
        if outcome in UNSENT:
            path = self.storage.folder.contents(batch.input_file_id)
            lines = read_lines(path, results.done, self._max_line_bytes)
            with contextlib.suppress(StoreFull), needs_room():
                await refuse_lines(lines, results, f"batch_{outcome}", UNSENT[outcome])
        await in_thread(results.sync)
        await self._batches.update(
            batch_id,
            status=outcome,
            completed=results.completed,
            failed=results.failed,
            output_file_id=await self._publish(batch, batch.output_id, "output"),
            error_file_id=await self._publish(batch, batch.error_id, "error"),
        )

    async def _publish(self, batch: BatchRecord, file_id: str, role: str) -> str | None:
        """Make a file of results visible and return its id; delete it if it is empty."""
        path = self.storage.folder.contents(file_id)
        size = path.stat().st_size
        if not size:
            path.unlink()
            return None
        now = time.time()
        expires_at = None if batch.output_lifetime is None else now + batch.output_lifetime
        name = f"{batch.id}_{role}.jsonl"
        file = StoredFile(file_id, batch.tenant, name, size, now, OUTPUT, expires_at)
        await self.storage.files.add(file)
        return file_id


def _behind_others(line: BatchLine) -> BatchLine:
    body = msgspec.Raw(with_priority(line, LAST_PRIORITY))
    return msgspec.structs.replace(line, body=body)
