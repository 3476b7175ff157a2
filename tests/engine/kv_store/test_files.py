"""BlockFiles: only what was written for a model and a block is read; the bound holds."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.kv_store.files import HEAD_BYTES, BlockFiles
from engine.kv_store.folder import StoreFolder
from tests.support.damaged_blocks import KINDS, Kind, Place, block_files, damage, full_folder

SIZE = 5000  # bytes of a block of group 0; on the disk 8192
BOUND = 10 * 8192


def key(number: int, group: int = 0) -> bytes:
    return number.to_bytes(16, "big") + group.to_bytes(2, "big")


def payload(number: int) -> memoryview:
    return memoryview(number.to_bytes(4, "big") * (SIZE // 4))


def opened(folder: StoreFolder, model: bytes = b"m", bound: int = BOUND) -> BlockFiles:
    files = BlockFiles(folder, model, {0: SIZE, 1: 100}, bound)
    files.scan()
    return files


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StoreFolder]:
    folder = StoreFolder.open(tmp_path / "kv")
    yield folder
    folder.close()


def on_disk(folder: Path) -> int:
    return sum(file.stat().st_blocks * 512 for file in folder.glob("model-*/*"))


def test_written_block_is_read_by_the_next_process(folder: StoreFolder) -> None:
    files = opened(folder)
    files.write(key(1), 7, payload(1))
    assert files.has(key(1))
    later = opened(folder)
    assert later.has(key(1))
    assert later.read(key(1)) == payload(1)
    assert later.read(key(2)) is None
    assert later.index.num_bytes == files.index.num_bytes == 8192
    [file] = block_files(folder.path)
    assert (file.stat().st_mode & 0o777, file.stat().st_mtime_ns) == (0o600, 7)
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert not any(later.errors.values())


@pytest.mark.parametrize("is_known", [True, False], ids=["after the scan", "before the scan"])
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_damaged_file_is_missing_and_makes_room_for_a_new_one(
    folder: StoreFolder, is_known: bool, kind: Kind
) -> None:
    files = opened(folder)
    other = opened(folder, b"another model")
    for number in range(3):
        files.write(key(number), 9, payload(number))
    other.write(key(0), 9, payload(0))
    target = folder.path / files.path_of(key(0))
    others = [(folder.path / files.path_of(key(number))).read_bytes() for number in (1, 2)]
    foreign = [(folder.path / other.path_of(key(0))).read_bytes()]
    if is_known:
        files = opened(folder)
    kind(Place(target, others, foreign, random.Random(1)))
    if not is_known:
        files = opened(folder)
    assert files.read(key(0)) is None
    assert files.read(key(1)) == payload(1)
    assert not files.has(key(0))
    files.write(key(0), 9, payload(0))
    if kind is not full_folder:  # it is not ours to empty
        assert files.read(key(0)) == payload(0)
    outside = [*tmp_files(folder.path)]
    assert all(file.read_bytes()[HEAD_BYTES:] == payload(0) for file in outside)


def tmp_files(folder: Path) -> list[Path]:
    """Return the files outside the folder that a link in it may name."""
    return [*folder.parent.glob("outside-*")]


def test_all_damaged_files_of_a_folder_are_missing(folder: StoreFolder) -> None:
    bound = 200 * 8192
    files = opened(folder, bound=bound)
    for number in range(64):
        files.write(key(number), 9, payload(number))
    assert damage(folder.path, [b"other"], 1) == 64
    later = opened(folder, bound=bound)
    assert [later.read(key(number)) for number in range(64)] == [None] * 64


def test_bound_holds_while_files_are_written_and_after_a_restart(
    folder: StoreFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = opened(folder)
    found: list[int] = []
    rename = os.rename

    def noting_rename(*names: str, **folders: int) -> None:
        found.append(on_disk(folder.path))  # the new file is complete, and has its first name
        rename(*names, **folders)

    monkeypatch.setattr(os, "rename", noting_rename)
    for number in range(300):
        size = SIZE if number % 2 == 0 else 100
        files.write(key(number, number % 2), number, payload(number)[:size])
        files.index.check()
    assert len(found) == 300
    assert BOUND - 8192 <= max(found) <= BOUND
    assert files.num_evicted > 200
    assert files.has(key(299, 1))
    later = opened(folder, bound=BOUND // 4)
    assert on_disk(folder.path) <= BOUND // 4
    assert later.has(key(299, 1))
    later.index.check()


def test_files_of_other_models_leave_when_their_room_is_needed(folder: StoreFolder) -> None:
    old = opened(folder, b"old")
    for number in range(10):
        old.write(key(number), number, payload(number))
    new = opened(folder, b"new")
    for number in range(10):
        new.write(key(number), 100, payload(number))
    assert on_disk(folder.path) <= BOUND
    assert [new.has(key(number)) for number in range(10)] == [True] * 10
    opened(folder, b"new")
    assert not (folder.path / old.name).exists(), "its empty folder is deleted"


@pytest.mark.parametrize(
    ("number", "reason"), [(errno.ENOSPC, "disk_full"), (errno.EROFS, "write")]
)
def test_failed_write_leaves_no_file_and_is_counted(
    folder: StoreFolder, number: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = opened(folder)
    files.write(key(1), 1, payload(1))

    def fail(*given: object, **named: object) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        for _ in range(3):
            files.write(key(2), 2, payload(2))
    assert dict(files.errors) == {reason: 1}, "writing pauses after a failure"
    assert files.problem == os.strerror(number)
    assert len([*folder.path.glob("model-*/*")]) == 1
    files.index.check()
    monkeypatch.setattr("engine.kv_store.files.PAUSE_S", 0.0)
    monkeypatch.setattr(files, "_no_writes_before", 0.0)
    files.write(key(2), 2, payload(2))
    assert files.read(key(2)) == payload(2)


def test_times_of_use_survive_a_restart(folder: StoreFolder) -> None:
    files = opened(folder)
    for number in range(3):
        files.write(key(number), number, payload(number))
    files.touch([key(0)], 50)
    files.save_times()
    later = opened(folder, bound=3 * 8192)
    later.write(key(9), 60, payload(9))
    assert [later.has(key(number)) for number in range(3)] == [True, False, True]
