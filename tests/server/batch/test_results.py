"""The files of results: what a cut or foreign file does, and that each line counts once."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import orjson
import pytest

from server.batch.results import Results, ResultsError, result_line


def line(custom_id: str) -> bytes:
    return result_line(custom_id, {"status_code": 200}, None)


def opened(tmp_path: Path) -> Results:
    return Results(tmp_path / "out", tmp_path / "err")


async def test_results_of_both_files_are_done_after_reopening(tmp_path: Path) -> None:
    results = opened(tmp_path)
    await results.add("a", line("a"), failed=False)
    await results.add("b", line("b"), failed=True)
    results.close()
    again = opened(tmp_path)
    assert (again.done, again.completed, again.failed) == ({"a", "b"}, 1, 1)
    again.close()
    again.close()


async def test_line_cut_anywhere_is_dropped(tmp_path: Path) -> None:
    for cut in range(1, len(line("b"))):
        (tmp_path / "out").write_bytes(line("a") + line("b")[:-cut])
        results = opened(tmp_path)
        assert results.done == {"a"}
        await results.add("b", line("b"), failed=False)
        results.close()
        written = [orjson.loads(each) for each in (tmp_path / "out").read_bytes().splitlines()]
        assert [each["custom_id"] for each in written] == ["a", "b"]


def test_only_line_cut_anywhere_is_dropped(tmp_path: Path) -> None:
    whole = line("a")
    for size in range(len(whole)):
        (tmp_path / "out").write_bytes(whole[:size])
        results = opened(tmp_path)
        assert (results.done, (tmp_path / "out").read_bytes()) == (set(), b"")
        results.close()


def test_lines_after_a_hole_are_dropped(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(line("a") + b"\0" * 100 + b"\n" + line("b"))
    results = opened(tmp_path)
    assert results.done == {"a"}
    results.close()


@pytest.mark.parametrize("content", [b"diary\n", b'{"id":"x"}\n', b"\n"])
def test_foreign_file_is_refused_and_unchanged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "out").write_bytes(content)
    with pytest.raises(ResultsError, match="other content"):
        opened(tmp_path)
    assert (tmp_path / "out").read_bytes() == content


def test_second_result_of_a_line_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(line("a"))
    (tmp_path / "err").write_bytes(line("a"))
    with pytest.raises(ResultsError, match="second result"):
        opened(tmp_path)


def test_second_writer_is_refused(tmp_path: Path) -> None:
    results = opened(tmp_path)
    with pytest.raises(ResultsError, match="Another process"):
        opened(tmp_path)
    results.close()


async def test_full_disk_leaves_no_part_of_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from server.batch import results as module

    results = opened(tmp_path)
    write = module.os.write
    sizes = iter([5])

    def half(descriptor: int, data: memoryview) -> int:
        size = next(sizes, None)
        if size is None:
            raise OSError(28, "No space left on device")
        return write(descriptor, data[:size])

    monkeypatch.setattr(module.os, "write", half)
    with pytest.raises(OSError, match="No space"):
        await results.add("a", line("a"), failed=False)
    monkeypatch.undo()
    assert (tmp_path / "out").read_bytes() == b""
    assert not results.done
    results.close()


async def test_bytes_that_are_not_written_are_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[int] = []
    output = tmp_path / "out"
    results = Results(output, tmp_path / "err", held.append, lambda size: held.append(-size))
    await results.add("a", line("a"), failed=False)

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "write", refuse)
    with pytest.raises(OSError, match="No space"):
        await results.add("b", line("b"), failed=False)
    monkeypatch.undo()
    assert sum(held) == output.stat().st_size == len(line("a"))
    results.close()


def test_bytes_of_a_line_written_in_part_are_given_back(tmp_path: Path) -> None:
    (tmp_path / "out").write_bytes(line("a") + line("b")[:12])
    released: list[int] = []
    Results(tmp_path / "out", tmp_path / "err", release=released.append).close()
    assert sum(released) == 12
