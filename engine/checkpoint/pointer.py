"""Pointers of Git LFS: small files that stand for the files of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from engine.errors import ConfigError

POINTER = b"version https://git-lfs.github.com/"


def refuse_pointer(file: Path) -> None:
    """Raise ConfigError if `file` is a Git LFS pointer, left by a clone without Git LFS."""
    try:
        with file.open("rb") as stream:
            is_pointer = stream.read(len(POINTER)) == POINTER
    except OSError:
        return  # the caller reports it when it reads the file
    if is_pointer:
        raise ConfigError(
            f"{file} is a Git LFS pointer, not the file. Run `git lfs pull` in its folder, or "
            "`penstock pull ORG/NAME`."
        )
