"""FileStore: uploaded inputs and the results of batches, each visible to its owner only."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Set
from pathlib import Path

import msgspec

from server.batch.folder import BatchFolder, StoreFull, read_records, sync_folder, write_record
from server.batch.threads import in_thread


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
        self._most_files = most_files
        self.most_bytes = most_bytes
        found = read_records(folder.files, StoredFile)
        ordered = sorted(found, key=lambda file: file.created_at)
        self._files = {file.id: file for file in ordered}

    def sweep(self, needed: Set[str]) -> None:
        """Delete contents without a record, unless they are `needed`, and count the others."""
        for path in self._folder.files.glob("*.jsonl"):
            if path.stem in self._files or path.stem in needed:
                self._folder.used += path.stat().st_size
            else:
                path.unlink()

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

    def contents(self, file: StoredFile) -> Path:
        return self._folder.contents(file.id)

    def begin_upload(self) -> Upload:
        """Return a new upload. Raises StoreFull if there are too many files."""
        if len(self._files) >= self._most_files:
            raise StoreFull(
                f"There are {self._most_files} files, the limit of --max-batch-files: delete files."
            )
        return Upload(self._folder, self.most_bytes)

    async def add(self, file: StoredFile) -> None:
        """Make a file visible whose contents are in place. Raises OSError."""
        await in_thread(lambda: write_record(self._folder.files, file.id, file))
        self._files[file.id] = file

    async def delete(self, file: StoredFile) -> None:
        """Delete a file. Its record goes first, so that no crash leaves one without contents."""
        if self._files.pop(file.id, None) is not None:
            await in_thread(lambda: self._remove(file))

    def _remove(self, file: StoredFile) -> None:
        (self._folder.files / f"{file.id}.json").unlink(missing_ok=True)
        self.contents(file).unlink(missing_ok=True)
        self._folder.release(file.bytes)

    async def delete_expired(self, needed: Set[str]) -> None:
        """Delete the files that have expired, unless they are `needed`."""
        now = time.time()
        for file in list(self._files.values()):
            if _is_expired(file, now) and file.id not in needed:
                await self.delete(file)


def _is_expired(file: StoredFile, now: float) -> bool:
    return file.expires_at is not None and file.expires_at <= now


class Upload:
    """The contents of one file on their way into the store. Close it in every case."""

    def __init__(self, folder: BatchFolder, most_bytes: int) -> None:
        self.size = 0
        self._folder = folder
        self._most_bytes = most_bytes
        self._id = new_file_id()
        self._path = folder.uploads / self._id
        self._file = self._path.open("xb")

    def write(self, data: bytes) -> None:
        """Append to the contents. Raises FileTooLarge, StoreFull or OSError."""
        if self.size + len(data) > self._most_bytes:
            raise FileTooLarge(self._most_bytes)
        self._folder.reserve(len(data))
        self.size += len(data)
        self._file.write(data)

    def finish(
        self, tenant: str, filename: str, purpose: str, lifetime: float | None
    ) -> StoredFile:
        """Put the contents in place and return the record to add. Raises OSError.

        `lifetime` is in seconds; None means forever.
        """
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._path.rename(self._folder.contents(self._id))
        sync_folder(self._folder.files)
        now = time.time()
        expires_at = None if lifetime is None else now + lifetime
        size, self.size = self.size, 0  # the bytes now belong to the file
        return StoredFile(self._id, tenant, filename, size, now, purpose, expires_at)

    def close(self) -> None:
        """Delete contents that are not in place."""
        self._file.close()
        self._path.unlink(missing_ok=True)
        self._folder.release(self.size)
        self.size = 0
