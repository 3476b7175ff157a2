"""Changes of a figure in an answer, which the check of a page must notice."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest

UNCHANGED = "as it is"
Change = Callable[[Any], None]


@dataclass
class Changed:
    """A change that knows whether it was made."""

    change: Change
    count: int = 0

    def __call__(self, document: Any) -> None:
        self.change(document)
        self.count += 1


def verify(check: Callable[[], object], change: Changed | None) -> None:
    """Run a check, which must fail if there is a change."""
    if change is None:
        check()
        return
    with pytest.raises(AssertionError):
        check()
    assert change.count


def changes(mutants: Iterable[str]) -> Any:
    return pytest.mark.parametrize("name", [UNCHANGED, *mutants])


def add(*path: str | int, by: float) -> Change:
    """Return a change that adds to the figure at the end of a path."""

    def change(document: Any) -> None:
        *way, last = path
        for step in way:
            document = document[step]
        document[last] += by

    return change
