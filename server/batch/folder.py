"""The folder of --batch-dir: files, batches, and the bound on their bytes.

lock                        held by the server that uses the folder
files/ID.jsonl              contents of a file, or the results of a running batch
files/ID.json               its StoredFile; a file without one is not visible yet
batches/ID.json             a BatchRecord
uploads/                    unfinished uploads
spare                       room for records on a full disk
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import msgspec
import structlog

from engine.client.shares import Shares
from engine.errors import ConfigError

Record = TypeVar("Record", bound=msgspec.Struct)


FULL = (errno.ENOSPC, errno.EDQUOT)
SPARE_BYTES = 256 << 10  # some records, each in two copies

log = structlog.get_logger("server.batches")


class StoreFull(Exception):
    """The folder has no room. The message says which limit to raise."""


@contextlib.contextmanager
def needs_room() -> Iterator[None]:
    """Raise StoreFull in place of the OSError of a full disk or an exhausted quota."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        text = "The disk of --batch-dir is full: delete files, or make room on it."
        raise StoreFull(text) from error


class BatchFolder:
    """The open folder. Raises ConfigError if it cannot be used, or if another server uses it.

    `used` counts the bytes in contents and results, at most `most`; no tenant may hold all of them.
    """

    def __init__(self, path: Path, most: int) -> None:
        self.used = Shares(most)
        self._lock_of_used = threading.Lock()  # files are deleted in threads
        self.files = path / "files"
        self.batches = path / "batches"
        self.uploads = path / "uploads"
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(self.uploads, ignore_errors=True)
            for folder in (self.files, self.batches, self.uploads):
                folder.mkdir(mode=0o700, exist_ok=True)
                for left in folder.glob("*.tmp"):  # a record that a crash or a full disk cut
                    left.unlink()
        except BlockingIOError:
            os.close(self._lock)
            raise ConfigError(f"--batch-dir: another server uses {path}.") from None
        except OSError as error:
            raise ConfigError(f"--batch-dir: {path} cannot be used: {error.strerror}.") from None
        self._spare = path / "spare"
        self._keep_spare()

    def close(self) -> None:
        """Let another server use the folder. A second call does nothing."""
        lock, self._lock = self._lock, -1
        if lock >= 0:
            os.close(lock)

    def save(
        self, folder: Path, name: str, record: msgspec.Struct, *, uses_spare: bool = False
    ) -> None:
        """Write a record so that a crash leaves the old one or the new one.

        With `uses_spare` it is written on a full disk too, for what has happened already. Raises
        StoreFull without room, and OSError.
        """
        with needs_room():
            try:
                _write_record(folder, name, record)
            except OSError as error:
                if error.errno not in FULL or not uses_spare or not self._spare.exists():
                    raise
                self._spare.unlink()
                _write_record(folder, name, record)
        self._keep_spare()

    def _keep_spare(self) -> None:
        """Occupy room on the disk, if there is any."""
        if self._spare.exists():
            return
        descriptor = -1
        try:
            descriptor = os.open(self._spare, os.O_WRONLY | os.O_CREAT, 0o600)
            os.posix_fallocate(descriptor, 0, SPARE_BYTES)
        except OSError:
            with contextlib.suppress(OSError):
                self._spare.unlink(missing_ok=True)
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def contents(self, file_id: str) -> Path:
        """Return the path of a file's contents. Only ids made by this server may be given."""
        return self.files / f"{file_id}.jsonl"

    def reserve(self, tenant: str, size: int) -> None:
        """Count `size` more bytes. Raises StoreFull beyond the limit or the tenant's share."""
        with self._lock_of_used:
            self._check(tenant, size)
            self.used.take(tenant, size)

    def _check(self, tenant: str, size: int) -> None:
        limit = f"{self.used.capacity} bytes, the limit of --max-batch-dir-bytes"
        if not self.used.has_room(size):
            raise StoreFull(f"The files would take more than {limit}: delete files.")
        if not self.used.may_take(tenant, size):
            raise StoreFull(
                f"The files of this API key hold {self.used.held(tenant)} bytes, its share of "
                f"{limit}: delete files."
            )

    def release(self, tenant: str, size: int) -> None:
        with self._lock_of_used:
            self.used.give_back(tenant, size)


def _write_record(folder: Path, name: str, record: msgspec.Struct) -> None:
    """Write a record and put it in place. Raises OSError; the record has not changed then."""
    temporary, place = folder / f"{name}.tmp", folder / f"{name}.json"
    is_new = not place.exists()
    try:
        with temporary.open("wb") as file:
            file.write(msgspec.json.encode(record))
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(place)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    try:
        sync_folder(folder)
    except OSError as error:
        if is_new:
            place.unlink()
            raise
        # The next start reads the new record, so an error would deny what has happened.
        log.error("a record may not survive a power cut", record=name, cause=str(error))


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_records(folder: Path, kind: type[Record]) -> Iterator[Record]:
    """Yield all records in a folder. Raises ConfigError for a damaged one."""
    for path in sorted(folder.glob("*.json")):
        try:
            yield msgspec.json.decode(path.read_bytes(), type=kind)
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(f"--batch-dir: {path} cannot be read: {error}") from None
