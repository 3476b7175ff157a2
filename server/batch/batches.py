"""BatchStore: the records of all batches, each visible to its owner only."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Container
from typing import Any, Literal, get_args

import msgspec
import structlog

from engine.client.shares import Shares
from server.batch.files import new_file_id
from server.batch.folder import BatchFolder, read_records
from server.batch.lines import LineProblem
from server.batch.threads import in_thread

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ENDED = frozenset({"failed", "completed", "expired", "cancelled"})
UNENDED = frozenset(get_args(Status)) - ENDED
WINDOW_S = 24 * 3600

log = structlog.get_logger("server.batches")


class BatchRecord(msgspec.Struct, frozen=True):
    """One batch. `times` has the Unix seconds at which it reached each status.

    `output_id` and `error_id` are reserved at the start; `output_file_id` and `error_file_id` are
    set when the files exist. `starts` counts the starts since the last new result.
    """

    id: str
    tenant: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: float
    output_id: str
    error_id: str
    status: Status = "validating"
    times: dict[str, int] = {}
    metadata: dict[str, str] | None = None
    output_lifetime: int | None = None  # seconds
    problems: list[LineProblem] = []
    total: int = 0
    completed: int = 0
    failed: int = 0
    starts: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None

    @property
    def is_ended(self) -> bool:
        return self.status in ENDED

    @property
    def expires_at(self) -> float:
        return self.created_at + WINDOW_S


def new_batch(tenant: str, endpoint: str, input_file_id: str, **more: Any) -> BatchRecord:
    """Return the record of a batch that has not begun."""
    return BatchRecord(
        id=f"batch_{secrets.token_hex(12)}",
        tenant=tenant,
        endpoint=endpoint,
        input_file_id=input_file_id,
        completion_window="24h",
        created_at=time.time(),
        output_id=new_file_id(),
        error_id=new_file_id(),
        **more,
    )


class BatchStore:
    """All batches of a folder. Beyond `most`, ended ones of the largest tenant are forgotten."""

    def __init__(self, folder: BatchFolder, most: int) -> None:
        self._folder = folder
        self._most = most
        self._saving = asyncio.Lock()
        found = read_records(folder.batches, BatchRecord)
        ordered = sorted(found, key=lambda batch: batch.created_at)
        self._batches = {batch.id: batch for batch in ordered}

    def __getitem__(self, batch_id: str) -> BatchRecord:
        return self._batches[batch_id]

    def has_room(self, tenant: str) -> bool:
        """Whether the tenant may add a batch before another one has ended."""
        unfinished = Shares(self._most)
        for batch in self.unfinished():
            unfinished.take(batch.tenant)
        return unfinished.has_room() and unfinished.may_take(tenant)

    def unfinished(self) -> list[BatchRecord]:
        """Return the batches that have not ended, the oldest first."""
        return [batch for batch in self._batches.values() if not batch.is_ended]

    def owned(self, tenant: str) -> list[BatchRecord]:
        """Return the batches of an owner, the oldest first."""
        return [batch for batch in self._batches.values() if batch.tenant == tenant]

    def find(self, batch_id: str, tenant: str) -> BatchRecord | None:
        """Return a batch, or None if the owner has no such batch."""
        batch = self._batches.get(batch_id)
        return batch if batch is not None and batch.tenant == tenant else None

    def needed_files(self) -> dict[str, str]:
        """Return the ids of the files that unfinished batches read or write, with their tenants."""
        needed = {}
        for batch in self.unfinished():
            for file_id in (batch.input_file_id, batch.output_id, batch.error_id):
                needed[file_id] = batch.tenant
        return needed

    async def add(self, batch: BatchRecord) -> None:
        """Keep a new batch, if it can be written. Raises StoreFull or OSError."""
        async with self._saving:
            await self._write(batch, uses_spare=False)
            try:
                self._forget_old()
            except OSError as error:  # the new batch is written all the same
                log.error("an old batch cannot be deleted", cause=str(error))

    def _forget_old(self) -> None:
        """Forget ended batches beyond the limit. Raises OSError."""
        while len(self._batches) > self._most and (old := self._least_needed()):
            (self._folder.batches / f"{old.id}.json").unlink(missing_ok=True)
            del self._batches[old.id]

    def _least_needed(self) -> BatchRecord | None:
        """Return the oldest ended batch of the tenant that has most batches, if any has ended."""
        held = Counter(batch.tenant for batch in self._batches.values())
        ended = [batch for batch in self._batches.values() if batch.is_ended]
        return max(ended, key=lambda batch: held[batch.tenant], default=None)

    async def update(
        self, batch_id: str, *, only_from: Container[Status] = UNENDED, **changes: Any
    ) -> BatchRecord:
        """Change a batch, and return it when the change is on the disk.

        A new status is stamped with its time. A batch that has another status than those of
        `only_from` by then is returned as it is. Raises StoreFull or OSError; the batch has not
        changed then.
        """
        async with self._saving:
            old = self._batches[batch_id]
            if old.status not in only_from:
                return old
            if "status" in changes:
                changes["times"] = {**old.times, changes["status"]: int(time.time())}
            await self._write(msgspec.structs.replace(old, **changes), uses_spare=True)
            return self._batches[batch_id]

    async def _write(self, batch: BatchRecord, *, uses_spare: bool) -> None:
        """Write a record, and keep it only then. A cancelled caller's record is kept, too."""
        folder = self._folder

        def write() -> None:
            folder.save(folder.batches, batch.id, batch, uses_spare=uses_spare)

        def keep(_: None) -> None:
            self._batches[batch.id] = batch

        await in_thread(write, cancelled_with=keep)
        keep(None)
