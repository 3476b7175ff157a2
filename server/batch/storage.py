"""BatchStorage: what --batch-dir holds, opened once by `create_app`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from server.batch.batches import BatchStore
from server.batch.disk import DiskUse
from server.batch.files import FileStore
from server.batch.folder import BatchFolder
from server.config import ServerConfig


@dataclass(frozen=True)
class BatchStorage:
    """The folder, its files and its batches."""

    folder: BatchFolder
    files: FileStore
    batches: BatchStore
    disk: DiskUse

    async def delete_expired(self) -> None:
        """Delete the expired files that no unfinished batch needs."""
        await self.files.delete_expired(self.batches.needed_files())


def open_storage(config: ServerConfig) -> BatchStorage | None:
    """Return the storage of --batch-dir, or None without this flag. Raises ConfigError."""
    if config.batch_dir is None:
        return None
    folder = BatchFolder(Path(config.batch_dir), config.max_batch_dir_bytes)
    try:
        files = FileStore(folder, config.max_batch_files, config.max_upload_bytes)
        batches = BatchStore(folder, config.max_batch_files)
        files.sweep(batches.needed_files())
    except BaseException:
        folder.close()
        raise
    return BatchStorage(folder, files, batches, DiskUse(folder.files))
