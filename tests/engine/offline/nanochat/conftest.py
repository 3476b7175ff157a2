"""A folder as nanochat's training leaves it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.nanochat_files import base_folder


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A base folder of nanochat with a model and a tokenizer."""
    return base_folder(tmp_path / "base")
