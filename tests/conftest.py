"""Fixtures every folder of tests shares."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def assets() -> Path:
    """Reference data beside the repository: tokenizers, templates, golden checkpoints."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "assets"
    if not folder.is_dir():
        pytest.skip(f"needs the reference data at {folder}")
    return folder


@pytest.fixture(scope="session")
def one_thread() -> None:
    """One torch thread, for good: tests share the machine, and idle torch threads spin."""
    import torch

    torch.set_num_threads(1)
