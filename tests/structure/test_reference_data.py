"""One file knows where the reference data is, so that a clone without it skips with one reason."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
ONE = TESTS / "support" / "reference_data.py"
PATH = re.compile(r"shared\W+assets")


def test_only_one_file_of_tests_has_the_path_of_the_reference_data() -> None:
    assert PATH.search(ONE.read_text(encoding="utf-8"))
    others = [file for file in TESTS.rglob("*.py") if file not in (ONE, Path(__file__))]
    found = [file for file in others if PATH.search(file.read_text(encoding="utf-8"))]
    assert [str(file.relative_to(TESTS)) for file in found] == ["e2e/test_setup.py"]  # of .ci/run
