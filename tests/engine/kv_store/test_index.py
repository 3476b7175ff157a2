"""FileIndex: the bound always holds, and the end of an old chain leaves first."""

from __future__ import annotations

import random

from engine.kv_store.index import PAGE, FileIndex


def add(index: FileIndex, path: str, used: int, size: int = PAGE) -> list[str] | None:
    leaving = index.reserve(size, used)
    if leaving is not None:
        index.add_reserved(path, size, used)
    index.check()
    return leaving


def test_least_recently_used_chain_leaves_from_its_end() -> None:
    index = FileIndex(6 * PAGE)
    for place in range(3):
        add(index, f"old {place}", 100 - place)
        add(index, f"new {place}", 200 - place)
    assert [add(index, f"last {place}", 300 - place) for place in range(4)] == [
        ["old 2"],
        ["old 1"],
        ["old 0"],
        ["new 2"],
    ]


def test_touched_chain_stays() -> None:
    index = FileIndex(2 * PAGE)
    add(index, "a", 1)
    add(index, "b", 2)
    index.touch(["a", "unknown"], 9)
    assert add(index, "c", 5) == ["b"]
    assert index.take_changed() == [("a", 9)]
    assert index.take_changed() == []


def test_chain_longer_than_the_bound_keeps_its_beginning() -> None:
    index = FileIndex(3 * PAGE)
    added = [add(index, f"{place}", 100 - place) for place in range(5)]
    assert added == [[], [], [], None, None]
    assert all(f"{place}" in index for place in range(3))


def test_file_larger_than_the_bound_evicts_nothing() -> None:
    index = FileIndex(2 * PAGE)
    add(index, "a", 1)
    assert add(index, "huge", 9, 2 * PAGE + 1) is None
    assert "a" in index


def test_canceled_write_gives_its_bytes_back() -> None:
    index = FileIndex(2 * PAGE)
    assert index.reserve(PAGE + 1, 5) == []
    assert index.reserve(1, 6) is None, "the bytes that are being written count"
    index.cancel(PAGE + 1)
    index.check()
    assert index.num_bytes == 0


def test_smaller_bound_after_a_restart_deletes_the_oldest() -> None:
    index = FileIndex(3 * PAGE)
    for number in range(5):
        index.add_found(f"{number}", PAGE, number)
    assert index.shrink() == ["0", "1"]
    index.check()


def test_random_histories_stay_within_the_bound() -> None:
    rng = random.Random(3)
    index = FileIndex(20 * PAGE)
    for step in range(3000):
        path = f"{rng.randrange(60)}"
        match rng.randrange(4):
            case 0:
                index.touch([path, f"{rng.randrange(60)}"], step)
            case 1:
                index.drop(path)
            case _:
                add(index, path, step, rng.randrange(1, 3 * PAGE))
        index.check()
