"""One file knows where the reference data is, so that a clone without it skips with one reason."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests import conftest
from tests.support.reference_data import ABSENT, located, references

TESTS = Path(__file__).parents[1]
ONE = TESTS / "support" / "reference_data.py"
PATH = re.compile(r"shared\W+assets")


def test_only_one_file_of_tests_has_the_path_of_the_reference_data() -> None:
    assert PATH.search(ONE.read_text(encoding="utf-8"))
    others = [file for file in TESTS.rglob("*.py") if file not in (ONE, Path(__file__))]
    found = [file for file in others if PATH.search(file.read_text(encoding="utf-8"))]
    assert [str(file.relative_to(TESTS)) for file in found] == ["e2e/test_setup.py"]  # of .ci/run


class Item:
    """The parts of a collected test that its marking reads."""

    nodeid = "tests/test_a.py::test_a"

    def __init__(self, *fixturenames: str, marks: tuple[str, ...] = ()) -> None:
        self.fixturenames = fixturenames
        self.marks = {name: getattr(pytest.mark, name).mark for name in marks}

    def add_marker(self, mark: pytest.MarkDecorator) -> None:
        self.marks[mark.name] = mark.mark

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return self.marks.get(name)


@pytest.mark.parametrize("is_present", [True, False])
def test_tests_that_use_the_data_are_marked_and_skipped_with_one_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_present: bool
) -> None:
    monkeypatch.setattr(conftest, "ASSETS", tmp_path if is_present else tmp_path / "absent")
    by_fixture, by_mark, other = items = [Item("assets"), Item(marks=("assets",)), Item("tmp_path")]
    conftest.pytest_collection_modifyitems(items)  # type: ignore[arg-type]
    for item in (by_fixture, by_mark):
        assert "assets" in item.marks
        skip = item.marks.get("skip")
        assert (skip and skip.kwargs) == (None if is_present else {"reason": ABSENT})
    assert other.marks.keys() == {"unit"}


def test_reference_data_that_is_absent_is_one_marked_parameter() -> None:
    [absent] = references("nothing/*.jinja")
    assert absent.values == ("nothing/*.jinja",)
    assert [mark.name for mark in absent.marks] == ["assets"]
    assert located("texts.json").is_relative_to(TESTS / "data")
