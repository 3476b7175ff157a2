"""FileStore: uploaded inputs and the results of batches, each visible to its owner only."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Container, Mapping
from pathlib import Path

import msgspec
import structlog

from engine.client.shares import Shares
from server.batch.folder import BatchFolder, StoreFull, needs_room, read_records, sync_folder
from server.batch.threads import in_thread

OUTPUT = "batch_output"  # the purpose of results

log = structlog.get_logger("server.batches")


class FileTooLarge(Exception):
    """An upload exceeds the limit of one file. The argument is the limit in bytes."""


class StoredFile(msgspec.Struct, frozen=True):
    """The record of a file. Times are Unix seconds; `tenant` is its owner."""

    id: str
    tenant: str
    filename: str
    bytes: int
    created_at: float
    purpose: str
    expires_at: float | None = None


def new_file_id() -> str:
    return f"file-{secrets.token_hex(12)}"


class FileStore:
    """All files of a folder, at most `most_files`; each upload has at most `most_bytes`."""

    def __init__(self, folder: BatchFolder, most_files: int, most_bytes: int) -> None:
        self._folder = folder
        self.most_bytes = most_bytes
        found = read_records(folder.files, StoredFile)
        ordered = sorted(found, key=lambda file: file.created_at)
        self._files = {file.id: file for file in ordered}
        self._deleting = asyncio.Lock()
        self._number = Shares(most_files)  # of files and of unfinished uploads
        for file in ordered:
            self._number.take(file.tenant)

    def sweep(self, needed: Mapping[str, str]) -> None:
        """Delete contents without a record, unless they are `needed`, and count the others.

        `needed` has the tenant of each file.
        """
        for path in self._folder.files.glob("*.jsonl"):
            file = self._files.get(path.stem)
            tenant = needed.get(path.stem) if file is None else file.tenant
            if tenant is None:
                path.unlink()
            else:
                self._folder.used.take(tenant, path.stat().st_size)

    def owned(self, tenant: str) -> list[StoredFile]:
        """Return the files of an owner, the oldest first."""
        now = time.time()
        mine = [file for file in self._files.values() if file.tenant == tenant]
        return [file for file in mine if not _is_expired(file, now)]

    def find(self, file_id: str, tenant: str) -> StoredFile | None:
        """Return a file, or None if the owner has no such file."""
        file = self._files.get(file_id)
        if file is None or file.tenant != tenant or _is_expired(file, time.time()):
            return None
        return file

    def has(self, file_id: str) -> bool:
        return file_id in self._files

    def discard(self, file_id: str, tenant: str) -> None:
        """Delete contents without a record, if there are any."""
        path = self._folder.contents(file_id)
        if not self.has(file_id) and path.exists():
            size = path.stat().st_size
            path.unlink()
            self._folder.release(tenant, size)

    def contents(self, file: StoredFile) -> Path:
        return self._folder.contents(file.id)

    def begin_upload(self, tenant: str) -> Upload:
        """Return a new upload. Raises StoreFull if there are too many files."""
        limit = f"{self._number.capacity} files, the limit of --max-batch-files"
        if not self._number.has_room():
            raise StoreFull(f"There are {limit}: delete files.")
        if not self._number.may_take(tenant):
            held = self._number.held(tenant)
            raise StoreFull(f"This API key has {held} files, its share of {limit}: delete files.")
        return Upload(self._folder, self._number, tenant, self.most_bytes)

    async def add(self, file: StoredFile) -> None:
        """Make a file visible whose contents are in place. Raises StoreFull or OSError.

        An upload whose record cannot be written is deleted. Results stay for another attempt.
        """
        is_output = file.purpose == OUTPUT

        def write() -> None:
            try:
                self._folder.save(self._folder.files, file.id, file, uses_spare=is_output)
            except BaseException:
                if not is_output:
                    self._remove(file)
                raise

        def keep(_: None) -> None:
            if file.id not in self._files:
                self._number.take(file.tenant)
            self._files[file.id] = file

        await in_thread(write, cancelled_with=keep)
        keep(None)

    async def delete(self, file: StoredFile) -> None:
        """Delete a file. Raises OSError; the file is still there then."""

        def forget(_: None) -> None:
            del self._files[file.id]
            self._number.give_back(file.tenant)

        async with self._deleting:
            if file.id in self._files:
                await in_thread(lambda: self._remove(file), cancelled_with=forget)
                forget(None)

    def _remove(self, file: StoredFile) -> None:
        """Delete the record first, so that no crash leaves one without contents.

        Raises OSError if the record is still there. Contents alone wait for the next start.
        """
        (self._folder.files / f"{file.id}.json").unlink(missing_ok=True)
        try:
            self.contents(file).unlink(missing_ok=True)
        except OSError as error:
            log.error("contents cannot be deleted", file=file.id, cause=str(error))
            return
        self._folder.release(file.tenant, file.bytes)

    async def delete_expired(self, needed: Container[str]) -> None:
        """Delete the files that have expired, unless they are `needed`."""
        now = time.time()
        for file in list(self._files.values()):
            if _is_expired(file, now) and file.id not in needed:
                await self.delete(file)


def _is_expired(file: StoredFile, now: float) -> bool:
    return file.expires_at is not None and file.expires_at <= now


class Upload:
    """The contents of one file on their way into the store. Close it once in every case.

    Raises StoreFull or OSError.
    """

    def __init__(self, folder: BatchFolder, number: Shares, tenant: str, most_bytes: int) -> None:
        """`number` counts the files of each tenant: this one as long as it is open."""
        self.size = 0
        self._folder = folder
        self._number = number
        self._tenant = tenant
        self._most_bytes = most_bytes
        self._id = new_file_id()
        self._path = folder.uploads / self._id
        with needs_room():
            self._file = self._path.open("xb")
        number.take(tenant)

    def write(self, data: bytes) -> None:
        """Append to the contents. Raises FileTooLarge, StoreFull or OSError."""
        if self.size + len(data) > self._most_bytes:
            raise FileTooLarge(self._most_bytes)
        self._folder.reserve(self._tenant, len(data))
        self.size += len(data)
        with needs_room():
            self._file.write(data)

    def finish(self, filename: str, purpose: str, lifetime: float | None) -> StoredFile:
        """Put the contents in place and return the record to add. Raises StoreFull or OSError.

        `lifetime` is in seconds; None means forever.
        """
        with needs_room():
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            contents = self._path.rename(self._folder.contents(self._id))
            try:
                sync_folder(self._folder.files)
            except OSError:
                contents.unlink()
                raise
        now = time.time()
        expires_at = None if lifetime is None else now + lifetime
        size, self.size = self.size, 0  # the bytes now belong to the file
        return StoredFile(self._id, self._tenant, filename, size, now, purpose, expires_at)

    def close(self) -> None:
        """Delete contents that are not in place."""
        with contextlib.suppress(OSError):  # bytes in its buffer do not fit on a full disk
            self._file.close()
        with contextlib.suppress(OSError):  # the next start deletes it
            self._path.unlink(missing_ok=True)
        self._number.give_back(self._tenant)
        self._folder.release(self._tenant, self.size)
        self.size = 0
