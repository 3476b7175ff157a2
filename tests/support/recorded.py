"""The lines of a record, which a thread of the server writes after the answer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.replay.recorded import RecordedAnswer, read_record
from tests.support.rig import eventually

if TYPE_CHECKING:
    from pathlib import Path


async def written_record(path: Path, count: int) -> dict[int, RecordedAnswer]:
    """Wait until `path` has `count` answers, and return them by their line's number."""
    await eventually(lambda: path.read_text().count("\n") >= count, f"{count} lines")
    return read_record(path)
