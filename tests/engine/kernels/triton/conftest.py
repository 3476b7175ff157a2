"""Fixtures for tests that compare kernels with torch in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton, which is not installed")


@pytest.fixture(scope="session", autouse=True)
def _interpreter() -> None:
    import triton

    from tests.support.interpreter import mend

    if not triton.knobs.runtime.interpret:
        pytest.skip("these tests need Triton's interpreter: set TRITON_INTERPRET=1")
    mend()


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill new tensors with NaN, so that elements a kernel does not write are noticed."""
    with torch.device("meta"):  # torch notes at the first use which functions make tensors
        torch.empty(0)
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-9)

    def fresh(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(empty(*args, **kwargs))

    def fresh_like(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(empty_like(*args, **kwargs))

    monkeypatch.setattr(torch, "empty", fresh)
    monkeypatch.setattr(torch, "empty_like", fresh_like)
