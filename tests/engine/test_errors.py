"""Messages have a bounded length, also about names that a checkpoint invents."""

from __future__ import annotations

from engine.errors import MAX_LINE, MAX_NAME, ConfigError, clipped, listed


def test_listed_names_all_of_a_few() -> None:
    assert listed([]) == ""
    assert listed(["a", "b"]) == "a, b"
    assert listed({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}) == "a, b, c, d, e"


def test_listed_counts_the_others() -> None:
    assert listed([str(n) for n in range(500_000)]) == "0, 1, 2, 3, 4 and 499995 more"
    assert listed(range(4), 3) == "0, 1, 2 and 1 more"


def test_listed_clips_long_names() -> None:
    assert len(listed(["x" * 10_000_000] * 9)) < 6 * MAX_NAME


def test_clipped_keeps_the_beginning_the_end_and_the_size() -> None:
    assert clipped("x" * MAX_LINE) == "x" * MAX_LINE
    found = clipped("begin" + "x" * 10_000 + "end", 100)
    assert found.startswith("begin")
    assert found.endswith("end")
    assert "(9908 characters left out)" in found


def test_config_error_has_a_bounded_line_for_each_problem() -> None:
    error = ConfigError("first " + "\x1b" * 10_000_000 + " last", "second")
    first, second = str(error).split("\n")
    assert first.startswith("first ")
    assert first.endswith(" last")
    assert len(first) < 10 * MAX_LINE
    assert second == "second"
