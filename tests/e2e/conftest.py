"""Checkpoints with known answers, and a server that several files share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.reference_data import LLAMA, located
from tests.support.serve import Server, serving
from tests.support.stories import Case, cases_of


@pytest.fixture(scope="session")
def llama() -> Path:
    return located(LLAMA)


@pytest.fixture(scope="session")
def stories(llama: Path) -> list[Case]:
    """Prompts and the outputs that the Llama checkpoint must generate."""
    return cases_of(llama)


@pytest.fixture(scope="session")
def demo() -> Iterator[Server]:
    """The demo model with its defaults, for tests that leave the server as it is."""
    with serving("demo") as server:
        yield server
