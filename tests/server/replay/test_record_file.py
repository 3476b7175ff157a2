"""RecordFile: a private file, whole lines only, and no exception for a disk that is full."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from engine.errors import ConfigError
from server.replay import record_file
from server.replay.record_file import RecordFile
from server.replay.recorded import read_record
from tests.server.replay.test_recorded import answer


def mode_of(file: Path) -> int:
    return stat.S_IMODE(file.stat().st_mode)


def test_answers_are_appended_to_a_file_of_this_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    before = os.umask(0)
    try:
        for choice in range(3):
            file = RecordFile(str(path))
            file.add([answer(choice=choice)])
            file.close()
    finally:
        os.umask(before)
    assert mode_of(path) == 0o600
    assert [each.choice for each in read_record(path).values()] == [0, 1, 2]


def test_existing_file_becomes_private(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.touch(mode=0o644)
    RecordFile(str(path)).close()
    assert mode_of(path) == 0o600


@pytest.mark.parametrize("name", ["none/record.jsonl", "."])
def test_path_that_cannot_be_written_is_a_config_error(tmp_path: Path, name: str) -> None:
    path = str(tmp_path / name)
    with pytest.raises(ConfigError, match=r"--record: .* cannot be opened"):
        RecordFile(path)


def test_file_of_another_server_is_a_config_error(tmp_path: Path) -> None:
    path = str(tmp_path / "record.jsonl")
    first = RecordFile(path)
    with pytest.raises(ConfigError, match="another server records to it"):
        RecordFile(path)
    first.close()
    RecordFile(path).close()


def test_full_disk_is_one_warning() -> None:
    with capture_logs() as logs:
        file = RecordFile("/dev/full")
        for _ in range(3):
            file.add([answer()])
        file.close()
    assert [(each["event"], each["reason"]) for each in logs] == [
        ("answers are not recorded", "No space left on device")
    ]


def test_disk_that_fills_up_leaves_no_part_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "record.jsonl"
    room = 700
    write = os.write

    def short(file: int, data: Any) -> int:
        left = room - os.fstat(file).st_size
        if left <= 0:
            raise OSError(28, "No space left on device")
        return write(file, data[: min(left, 50)])

    monkeypatch.setattr(record_file.os, "write", short)
    with capture_logs() as logs:
        for choice in range(3):
            file = RecordFile(str(path))
            file.add([answer(choice=choice)])
            file.close()
        room = 10_000
        file = RecordFile(str(path))
        file.add([answer(choice=3)])
        file.close()
    assert logs
    found = [each.choice for each in read_record(path).values()]
    assert found[0] == 0
    assert found[-1] == 3
    assert len(found) < 4


def test_slow_disk_loses_answers_with_a_warning_and_bounded_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_file, "MAX_TOKENS_WAITING", 12)  # two answers of five tokens
    monkeypatch.setattr(RecordFile, "_work", lambda self: None)
    file = RecordFile(str(tmp_path / "record.jsonl"))
    with capture_logs() as logs:
        for _ in range(4):
            file.add([answer()])
    assert len(file._waiting) == 2
    assert [each["reason"] for each in logs] == ["they wait for a slow disk"]


def test_answer_after_the_end_is_a_warning(tmp_path: Path) -> None:
    file = RecordFile(str(tmp_path / "record.jsonl"))
    file.close()
    file.close()
    with capture_logs() as logs:
        file.add([answer()])
    assert [each["reason"] for each in logs] == ["it is closed"]
