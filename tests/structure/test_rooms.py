"""The rooms of the engine, and those of the server, stand one above the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.structure.rooms import arrows, branches, knots, mutual_pairs


@pytest.mark.parametrize("top", ["engine", "server"])
def test_rooms_import_each_other_in_one_direction(top: str) -> None:
    graph = arrows(top)
    assert mutual_pairs(graph) == []
    assert knots(graph) == []


def test_knot_is_found_that_has_no_mutual_pair() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert mutual_pairs(graph) == []
    assert knots(graph) == [["a", "b", "c"]]


def test_mutual_pair_is_a_knot() -> None:
    graph = {"a": {"b"}, "b": {"a"}, "c": {"a", "b"}}
    assert mutual_pairs(graph) == [("a", "b")]
    assert knots(graph) == [["a", "b"]]


def test_branches_count_loops_cases_and_conditions(tmp_path: Path) -> None:
    source = (
        "def f(x):\n    for y in x:\n        if y and x:\n            pass\n"
        "    match x:\n        case 1:\n            pass\n        case _:\n            pass\n"
    )
    (tmp_path / "a.py").write_text(source)
    assert branches(tmp_path / "a.py") == {"f": 5}
