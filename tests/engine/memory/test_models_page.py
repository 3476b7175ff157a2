"""The memory table in docs/model-sizes.md equals what is planned."""

from __future__ import annotations

from pathlib import Path

from tests.support.model_sizes import table

PAGE = Path(__file__).parents[3] / "docs" / "model-sizes.md"


def test_page_lists_the_planned_memory_of_each_model() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    assert [line for line in table() if line not in lines] == []
