"""StoreFolder: the folder of --kv-cache-dir, which one process uses at a time, and its secret key.

    DIR/key             32 random bytes; only its owner may read it
    DIR/lock            locked while a process uses the folder
    DIR/model-HEX/      the files of one model

The key makes hashes of blocks equal in the next process, and proves that a file is ours.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import stat
from pathlib import Path
from typing import Self

from engine.config import EngineConfig
from engine.errors import ConfigError

log = logging.getLogger(__name__)

KEY_BYTES = 32
KEY, NEW_KEY, LOCK = "key", "key.new", "lock"
READ_ONLY = (errno.EROFS, errno.EACCES, errno.EPERM)


class StoreFolder:
    """An open and locked folder. Files are opened relative to it, and links are never followed."""

    def __init__(self, path: Path, descriptor: int, lock: int, secret: bytes) -> None:
        self.path = path
        self.descriptor = descriptor
        self._lock = lock
        self._secret = secret

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a folder, and make it and its key if they are missing. Raises ConfigError."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        except OSError as error:
            raise ConfigError(f"--kv-cache-dir: cannot open {path}: {error.strerror}.") from error
        lock = -1
        try:
            lock = _locked(path, descriptor)
            return cls(path, descriptor, lock, _secret(path, descriptor))
        except BaseException as error:
            for opened in (descriptor, lock):
                if opened >= 0:
                    os.close(opened)
            if isinstance(error, OSError):
                raise ConfigError(f"--kv-cache-dir: {path}: {error.strerror}.") from error
            raise

    def key_for(self, purpose: str) -> bytes:
        """Return 32 bytes that no one knows without the folder's key."""
        return hashlib.blake2b(purpose.encode(), digest_size=32, key=self._secret).digest()

    def close(self) -> None:
        """Let another process use the folder."""
        for opened in (self.descriptor, self._lock):
            if opened >= 0:
                os.close(opened)
        self.descriptor = self._lock = -1


def check_settings(config: EngineConfig) -> None:
    """Raise ConfigError if no model's blocks can be kept with these settings."""
    if not config.enable_prefix_caching:
        raise ConfigError("--kv-cache-dir needs --enable-prefix-caching.")
    if config.load_format == "dummy":
        raise ConfigError("--kv-cache-dir needs weights that are the same in the next process.")
    if config.tensor_parallel_size > 1:
        raise ConfigError(
            "--kv-cache-dir works with one process only. Leave out --tensor-parallel-size."
        )


def check_folder(config: EngineConfig) -> None:
    """Raise ConfigError if --kv-cache-dir is given and cannot be used."""
    if config.kv_cache_dir is not None:
        check_settings(config)
        StoreFolder.open(Path(config.kv_cache_dir)).close()


def _locked(path: Path, folder: int) -> int:
    """Return the descriptor of the locked file, or -1 if nothing can be written here.

    Raises OSError, or ConfigError if another process uses the folder.
    """
    flags = os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        lock = os.open(LOCK, flags, 0o600, dir_fd=folder)
    except OSError as error:
        if error.errno in READ_ONLY:
            return -1
        raise
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise ConfigError(
            f"--kv-cache-dir: another server uses {path}. Give each server a folder of its own."
        ) from None
    return lock


def _secret(path: Path, folder: int) -> bytes:
    """Return the folder's key, and make one if there is none. Raises OSError and ConfigError."""
    try:
        descriptor = os.open(KEY, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except FileNotFoundError:
        return _new_secret(folder)
    with open(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid not in (0, os.geteuid()):
            raise ConfigError(
                f"--kv-cache-dir: {path / KEY} is not a file of this user. Delete it: the next "
                "start makes a new one."
            )
        secret = file.read(KEY_BYTES + 1)
    if len(secret) != KEY_BYTES:
        log.warning("%s is damaged: a new key is made, and what was kept is lost.", path / KEY)
        return _new_secret(folder)
    if facts.st_mode & 0o077:
        # A volume of Kubernetes with fsGroup changes modes at each mount.
        log.warning("%s could be read by other users.", path / KEY)
        with contextlib.suppress(OSError):  # the file may be root's
            os.chmod(KEY, 0o600, dir_fd=folder)
    return secret


def _new_secret(folder: int) -> bytes:
    """Write a new key under its name at once, so that no process reads a part of it."""
    secret = os.urandom(KEY_BYTES)
    flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_NOFOLLOW
    with open(os.open(NEW_KEY, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(secret)
        file.flush()
        os.fsync(file.fileno())
    os.rename(NEW_KEY, KEY, src_dir_fd=folder, dst_dir_fd=folder)
    return secret
