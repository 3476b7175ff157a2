"""A tiny checkpoint of random weights, for tests that need a model but no story."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.driver import tiny_llama


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("checkpoints") / "tiny-llama")
