"""Fixtures for tests of the golden models on a real GPU: `make gpu-check`.

With GPU_TESTS_ON=cpu they run on the CPU double: the engine on a CPU, and Triton's kernels in their
interpreter. That finds a broken test before a GPU is there; it says nothing about a GPU.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.e2e.conftest import llama, stories

__all__ = ["llama", "stories"]


@pytest.fixture(scope="session")
def cuda() -> str:
    """Return the device name for Driver and load; skip the test without a GPU."""
    if os.environ.get("GPU_TESTS_ON") == "cpu":
        interpreter = pytest.importorskip("tests.support.interpreter")
        interpreter.mend()
        return "cpu"
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")
    return "cuda"
