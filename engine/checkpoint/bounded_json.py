"""JSON and other text that comes with a checkpoint, within limits: it may be hostile.

Python's objects take far more memory than their text: an empty list of three bytes takes 80.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from engine.errors import ConfigError

# The format of safetensors allows 100 MB of header, which take long to read. An entry takes some
# 130 bytes, so this is room for over 200,000 tensors in a file.
MAX_JSON_BYTES = 32_000_000
MAX_PARTS = 2_000_000  # lists, objects and keys; an entry of a safetensors header has seven
BAD_JSON = (ValueError, OverflowError, RecursionError)  # raised for malformed or hostile JSON


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the bytes of a file. Raises OSError, or ValueError if it has more than `limit` bytes.

    The size is checked first, so that nothing is read of a file that is too large.
    """
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise ValueError(f"it has {size} bytes; at most {limit} are read")
        data = stream.read(limit + 1)  # a device or a pipe has no size
    if len(data) > limit:
        raise ValueError(f"it has more than {limit} bytes")
    return data


def loads(data: bytes) -> Any:
    """Return the value of JSON in UTF-8. Raises one of BAD_JSON, also beyond the limits."""
    if len(data) > MAX_JSON_BYTES:
        raise ValueError(f"it has more than {MAX_JSON_BYTES} bytes")
    num_parts = sum(data.count(mark) for mark in (b"[", b"{", b":"))
    if num_parts > MAX_PARTS:
        raise ValueError(
            f"it has {num_parts} lists, objects and keys; at most {MAX_PARTS} are read"
        )
    value = json.loads(data.decode("utf-8"), parse_int=_integer)
    if b"\\u" in data:
        json.dumps(value, ensure_ascii=False).encode()  # rejects lone surrogates such as \ud800
    return value


def _integer(text: str) -> int:
    """Return an integer that also fits a float: no setting needs a larger one."""
    value = int(text)
    if abs(value) > sys.float_info.max:
        raise ValueError(f"the number {text[:20]}… is too large")
    return value


def read_any_json(path: Path) -> Any:
    """Return the JSON value in a file. Raises OSError or one of BAD_JSON."""
    return loads(read_bounded(path, MAX_JSON_BYTES))


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
