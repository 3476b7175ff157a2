"""Fixtures every folder of tests shares."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def assets() -> Path:
    """Reference data beside the repository: tokenizers, templates, golden checkpoints."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "assets"
    if not folder.is_dir():
        pytest.skip(f"needs the reference data at {folder}")
    return folder


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One torch thread: tests share the machine, and threads of a tiny matmul only wait."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
