"""The golden models on a real GPU: `make gpu-check`."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def cuda() -> str:
    """The device, for Driver and load."""
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return "cuda"
