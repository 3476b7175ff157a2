"""Fixtures for tests of the golden models on a real GPU: `make gpu-check`."""

from __future__ import annotations

import pytest
import torch

from tests.e2e.conftest import llama, stories

__all__ = ["llama", "stories"]


@pytest.fixture(scope="session")
def cuda() -> str:
    """Return the device name for Driver and load; skip the test without a GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return "cuda"
