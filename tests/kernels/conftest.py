"""Kernels against their references, on the CPU in Triton's interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton, which is not installed")


@pytest.fixture(scope="session", autouse=True)
def _bfloat16_products() -> None:
    """The interpreter holds bfloat16 as 16-bit integers and would multiply these."""
    from triton import language as tl
    from triton.runtime import interpreter

    product = interpreter.InterpreterBuilder.create_dot

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.astype(np.uint32) << 16
        return interpreter.TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        return product(self, widened(a), widened(b), *more)

    interpreter.InterpreterBuilder.create_dot = create_dot


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh memory holds NaN, so that whatever a kernel leaves unwritten is seen."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.fill_(-9)

    def fresh(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(empty(*args, **kwargs))

    def fresh_like(*args: Any, **kwargs: Any) -> torch.Tensor:
        return poison(empty_like(*args, **kwargs))

    monkeypatch.setattr(torch, "empty", fresh)
    monkeypatch.setattr(torch, "empty_like", fresh_like)
