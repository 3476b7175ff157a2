"""BlockFiles: blocks of one model as files, each written and read as a whole.

A file has a head and the bytes of the block. The head has a keyed digest of the model, the block's
key and the bytes: it finds damage, and proves that a process with the folder's key has written the
file for this model and these tokens. A file that is not so is deleted and counts as missing.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from engine.kv_store.folder import StoreFolder
from engine.kv_store.index import FileIndex

MAGIC = b"PENSTKV1"
DIGEST_BYTES = 32
HEAD_BYTES = len(MAGIC) + DIGEST_BYTES
KEY_BYTES = 18  # of a block's prefix cache key
MODEL_FOLDER = re.compile(r"model-[0-9a-f]{32}")
BLOCK_FILE = re.compile(rf"([0-9a-f]{{{2 * KEY_BYTES}}})\.kv")
NEW = ".new"  # ends the name of a file that is being written
# Reasons of errors: a full disk, other failures, and files that were not what had been written.
ERRORS = ("disk_full", "write", "read", "damaged", "foreign")
PAUSE_S = 10.0  # without writing, after the disk was full or refused it
TAKEN = (errno.EISDIR, errno.ENOTEMPTY, errno.EEXIST)  # a folder has the name of the new file
OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# Opening must not block, should the file be a FIFO.
OPEN_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


class BlockFiles:
    """The files of one model in the folder, and the index of the files of all models there.

    `sizes` are the bytes of a block by its KV group. One thread writes and one reads; `has` and
    `touch` may be called in any thread.
    """

    def __init__(
        self, folder: StoreFolder, model: bytes, sizes: Mapping[int, int], capacity: int
    ) -> None:
        """`model` is a digest of all that changes the bytes of a block, or their meaning."""
        self._folder = folder
        self.sizes = sizes
        self._digest_key = folder.key_for("digest of a file")
        self._identity = hashlib.blake2b(
            model, digest_size=16, key=folder.key_for("name of a model")
        ).digest()
        self.name = f"model-{self._identity.hex()}"
        self.index = FileIndex(capacity)
        self.errors: Counter[str] = Counter()  # by reason
        self.problem = ""  # of the last file that could not be written
        self.num_written = self.num_evicted = 0
        self._no_writes_before = 0.0  # CLOCK_MONOTONIC seconds

    def path_of(self, key: bytes) -> str:
        """Return the path of a block's file in the folder."""
        return f"{self.name}/{key.hex()}.kv"

    def has(self, key: bytes) -> bool:
        """Return whether there seems to be a file of a block."""
        return self.path_of(key) in self.index

    def touch(self, keys: Sequence[bytes], used: int) -> None:
        """Note that a request needs a chain of blocks: see FileIndex."""
        self.index.touch([self.path_of(key) for key in keys], used)

    # ---- writing -----------------------------------------------------------------------------

    def write(self, key: bytes, used: int, payload: memoryview) -> None:
        """Write the file of a block, unless it is there, or the bound leaves no room for it."""
        path, size = self.path_of(key), HEAD_BYTES + len(payload)
        if path in self.index or time.monotonic() < self._no_writes_before:
            return
        leaving = self.index.reserve(size, used)
        if leaving is None:
            return
        try:
            self._evict(leaving)
            self._write(path, used, [MAGIC + self._digest(key, payload), payload])
        except OSError as error:
            self.index.cancel(size)
            self._remove(path + NEW)
            if error.errno in TAKEN:
                self.errors["foreign"] += 1
                return
            self._count_failure(error)
            self._no_writes_before = time.monotonic() + PAUSE_S
        else:
            self.index.add_reserved(path, size, used)
            self.num_written += 1

    def _write(self, path: str, used: int, parts: Sequence[bytes | memoryview]) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(self.name, 0o700, dir_fd=self._folder.descriptor)
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW
        with self._folder_of(path) as (folder, name):
            descriptor = os.open(name + NEW, flags, 0o600, dir_fd=folder)
            with open(descriptor, "wb", buffering=0) as file:
                for part in parts:
                    rest = memoryview(part)
                    while rest:
                        rest = rest[file.write(rest) :]
                os.utime(descriptor, ns=(used, used))
            os.rename(name + NEW, name, src_dir_fd=folder, dst_dir_fd=folder)

    @contextlib.contextmanager
    def _folder_of(self, path: str) -> Iterator[tuple[int, str]]:
        """Open the folder of a file; yield its descriptor and the file's name.

        No link is followed: all files stay in the folder of --kv-cache-dir.
        """
        model, _, name = path.partition("/")
        folder = os.open(model, OPEN_FOLDER, dir_fd=self._folder.descriptor)
        try:
            yield folder, name
        finally:
            os.close(folder)

    def _evict(self, paths: Sequence[str]) -> None:
        """Delete files that have left the index. Raises OSError if one cannot be deleted."""
        for number, path in enumerate(paths):
            try:
                with self._folder_of(path) as (folder, name):
                    os.unlink(name, dir_fd=folder)
            except FileNotFoundError:
                continue
            except OSError:
                for kept in paths[number:]:
                    self._find(kept)
                raise
            self.num_evicted += 1

    def _count_failure(self, error: OSError) -> None:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        self.errors["disk_full" if is_full else "write"] += 1
        self.problem = error.strerror or str(error)

    def _digest(self, key: bytes, payload: memoryview) -> bytes:
        # SHA-256 is twice as fast as BLAKE2b where the CPU has instructions for it.
        digest = hmac.new(self._digest_key, self._identity + key, "sha256")
        digest.update(payload)
        return digest.digest()

    # ---- reading -----------------------------------------------------------------------------

    def read(self, key: bytes) -> memoryview | None:
        """Return the bytes of a block. None if its file is absent or not what was written."""
        path = self.path_of(key)
        try:
            found = self._read(path, self.sizes[group_of(key)])
        except FileNotFoundError:
            self.index.drop(path)
            return None
        except OSError:  # also a link, a socket or a folder
            self.errors["read"] += 1
            self.delete(key)
            return None
        if found is not None:
            head, payload = found[:HEAD_BYTES], found[HEAD_BYTES:]
            if hmac.compare_digest(head, MAGIC + self._digest(key, payload)):
                return payload
        self.errors["damaged"] += 1
        self.delete(key)
        return None

    def _read(self, path: str, size: int) -> memoryview | None:
        """Return a file of a block of `size` bytes; None if it has another size. Raises OSError."""
        with self._folder_of(path) as (folder, name):
            descriptor = os.open(name, OPEN_FILE, dir_fd=folder)
        with open(descriptor, "rb", buffering=0) as file:
            facts = os.fstat(descriptor)
            if not stat.S_ISREG(facts.st_mode) or facts.st_size != HEAD_BYTES + size:
                return None
            buffer = memoryview(bytearray(facts.st_size))
            filled = 0
            while filled < len(buffer):
                count = file.readinto(buffer[filled:])
                if not count:
                    return None
                filled += count
            return buffer

    def delete(self, key: bytes) -> None:
        """Delete the file of a block, if there is one."""
        self.index.drop(self.path_of(key))
        self._remove(self.path_of(key))

    def _remove(self, path: str) -> None:
        """Delete what has a name in a model's folder. A folder with something in it stays."""
        with contextlib.suppress(OSError), self._folder_of(path) as (folder, name):
            try:
                os.unlink(name, dir_fd=folder)
            except IsADirectoryError:
                os.rmdir(name, dir_fd=folder)

    # ---- start and end -----------------------------------------------------------------------

    def scan(self) -> None:
        """Find the files of earlier processes, and delete those that do not fit the bound."""
        try:
            names = [n for n in os.listdir(self._folder.descriptor) if MODEL_FOLDER.fullmatch(n)]
            for name in names:
                self._scan_model(name)
            self._evict(self.index.shrink())
        except OSError as error:
            self._count_failure(error)

    def _scan_model(self, model: str) -> None:
        try:
            with self._folder_of(f"{model}/") as (folder, _):
                found = os.listdir(folder)
                for each in found:
                    with contextlib.suppress(OSError):
                        self._check(f"{model}/{each}", os.lstat(each, dir_fd=folder))
        except OSError:  # a link, or a file
            self.errors["foreign"] += 1
            return
        if not found and model != self.name:
            with contextlib.suppress(OSError):
                os.rmdir(model, dir_fd=self._folder.descriptor)

    def _find(self, path: str) -> None:
        """Add a file that could not be deleted to the index again."""
        with contextlib.suppress(OSError), self._folder_of(path) as (folder, name):
            self._check(path, os.lstat(name, dir_fd=folder))

    def _check(self, path: str, facts: os.stat_result) -> None:
        """Add a file of an earlier process to the index, or delete it if it cannot be a block's."""
        name, size = path.partition("/")[2], facts.st_size
        matched = BLOCK_FILE.fullmatch(name)
        fits = matched is not None and stat.S_ISREG(facts.st_mode) and size <= self.index.capacity
        if fits and matched is not None and path == f"{self.name}/{name}":
            group = group_of(bytes.fromhex(matched[1]))
            fits = size == HEAD_BYTES + self.sizes.get(group, -1)
        if fits:
            self.index.add_found(path, size, min(facts.st_mtime_ns, time.time_ns()))
            return
        if not path.endswith(NEW):  # else it was being written when its process ended
            self.errors["foreign"] += 1
        self._remove(path)

    def save_times(self) -> None:
        """Write when files were used last, for the next process."""
        for path, used in self.index.take_changed():
            with contextlib.suppress(OSError), self._folder_of(path) as (folder, name):
                os.utime(name, ns=(used, used), dir_fd=folder, follow_symlinks=False)


def group_of(key: bytes) -> int:
    """Return the KV group of a prefix cache key: see `cache_key`."""
    return int.from_bytes(key[-2:], "big")
