"""Checkpoints with known answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.stories import Case, cases_of


@pytest.fixture(scope="session")
def llama(assets: Path) -> Path:
    return assets / "checkpoints" / "stories260K-llama"


@pytest.fixture(scope="session")
def stories(llama: Path) -> list[Case]:
    """Prompts and the outputs that the Llama checkpoint must generate."""
    return cases_of(llama)
