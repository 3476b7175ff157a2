"""The small files of a checkpoint: JSON within limits, and pointers that stand in for files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.checkpoint import bounded_json
from engine.checkpoint.bounded_json import BAD_JSON
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


def read_any_json(path: Path) -> Any:
    """Return the JSON value in a file. Raises OSError or one of BAD_JSON."""
    with path.open("rb") as stream:
        return bounded_json.loads(stream.read(bounded_json.MAX_JSON_BYTES + 1))


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raises ConfigError with the file name if there is none."""
    try:
        value = read_any_json(path)
    except (OSError, *BAD_JSON) as error:
        raise ConfigError(f"Cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(value).__name__}.")
    return value


def read_optional(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`, or {} if there is no such file."""
    return read_json(path) if path.is_file() else {}
