"""Ranks read each other's notes."""

from __future__ import annotations

from pathlib import Path

from engine.device.board import COMPUTES, IDLE, RANK_BYTES, WAITS, Board, RankActivity


def boards(folder: Path, count: int) -> list[Board]:
    path = folder / "board"
    path.write_bytes(bytes(count * RANK_BYTES))
    return [Board(own, count, str(path)) for own in range(count)]


def test_notes_of_each_rank_are_seen_by_all(tmp_path: Path) -> None:
    first, second, third = boards(tmp_path, 3)
    second.compute()
    third.compute()
    third.wait()
    due = [RankActivity(0, IDLE), RankActivity(1, COMPUTES), RankActivity(2, WAITS)]
    assert first.read() == second.read() == third.read() == due
    second.rest()
    assert first.read()[1] == RankActivity(2, IDLE)
    for board in (first, second, third):
        board.close()


def test_wait_inside_a_computation_is_noted_until_it_ends() -> None:
    board = Board()
    board.compute()
    with board.waiting():
        assert board.read() == [RankActivity(2, WAITS)]
    assert board.read() == [RankActivity(3, COMPUTES)]


def test_wait_while_the_model_is_loaded_is_not_noted() -> None:
    board = Board()
    with board.waiting():
        assert board.read() == [RankActivity(0, IDLE)]
    assert board.read() == [RankActivity(0, IDLE)]
