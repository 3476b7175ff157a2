"""The folder where Penstock keeps what later starts reuse: machine code, converted settings."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
UNUSED_S = 30 * 86400.0  # seconds after which what no start has used is deleted
TOUCH_S = 86400.0  # seconds between two marks of use: a mark for each start would write too often


def cache_folder(kind: str) -> Path | None:
    """Return the folder of one kind, which may not exist; None if the user has no home."""
    chosen = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(chosen) if chosen else Path.home() / ".cache") / "penstock" / kind
    except RuntimeError:  # no home
        return None


def triton_folder(environment: Mapping[str, str]) -> Path | None:
    """Return the folder of Triton's kernels, as Triton 3 finds it; None if the user has no home."""
    if chosen := environment.get("TRITON_CACHE_DIR"):
        return Path(chosen)
    home = environment.get("TRITON_HOME")
    try:
        return (Path(home) if home else Path.home()) / ".triton" / "cache"
    except RuntimeError:  # no home
        return None


def protect_triton_folder() -> None:
    """Let Triton compile into a private temporary folder if others could change its kernels."""
    folder = triton_folder(os.environ)
    if folder is not None and cache_problem(folder) is not None:
        private = tempfile.mkdtemp(prefix="penstock-triton-")  # mode 0700
        atexit.register(shutil.rmtree, private, ignore_errors=True)
        os.environ["TRITON_CACHE_DIR"] = private


def cache_problem(*folders: Path) -> str | None:
    """Return why the files below one of these folders cannot be trusted; None if they can.

    Another user who can write there could let this process run their machine code. Absent folders
    have no problem.
    """
    for each in folders:
        try:
            facts = each.stat()
        except OSError:  # absent, or unreadable: then nothing is read from it
            continue
        if problem := _problem(facts):
            return f"{each} {problem}"
    return None


def is_trusted(facts: os.stat_result) -> bool:
    """Whether only this user can have written a file or folder."""
    return _problem(facts) is None


def _problem(facts: os.stat_result) -> str | None:
    if facts.st_uid != os.geteuid():
        return f"belongs to the user {facts.st_uid}, not to the user {os.geteuid()} of this process"
    if facts.st_mode & WRITABLE_BY_OTHERS:
        return f"can be written by other users (mode {stat.S_IMODE(facts.st_mode):04o})"
    return None


def make_cache_folder(folder: Path) -> None:
    """Make a cache folder, and the folder of all kinds, which no other user may open.

    Raises OSError. Existing folders are left as they are.
    """
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)


def mark_used(path: Path) -> None:
    """Note that this start uses a file, so that `delete_unused` keeps it."""
    with contextlib.suppress(OSError):  # a read-only folder
        if time.time() - path.stat().st_mtime > TOUCH_S:
            os.utime(path)


def delete_unused(folder: Path, is_current: Callable[[str], bool]) -> None:
    """Delete what no start has used for UNUSED_S seconds. Names that are current are kept."""
    oldest = time.time() - UNUSED_S
    with contextlib.suppress(OSError):  # an absent folder
        for path in list(folder.iterdir()):
            with contextlib.suppress(OSError):  # a read-only folder, or another start was faster
                if not is_current(path.name) and path.lstat().st_mtime < oldest:
                    _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
