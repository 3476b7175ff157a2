"""The interpreter of the tests refuses an access outside the tensors of a launch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import triton
import triton.language as tl


@triton.jit
def _copy_kernel(x_ptr, out_ptr, shift, size, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    inside = at < size
    tl.store(out_ptr + at + shift, tl.load(x_ptr + at, inside, 0.0), inside)


@triton.jit
def _add_kernel(out_ptr, place):
    tl.atomic_add(out_ptr + place, 1)


def copy(size: int, shift: int) -> torch.Tensor:
    out = torch.zeros(8)
    _copy_kernel[(1,)](torch.ones(6), out, shift, size, BLOCK=8)
    return out


def test_masked_numbers_may_be_outside() -> None:
    assert copy(6, 2).tolist() == [0, 0, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize(("size", "shift"), [(7, 0), (6, 3), (6, -1)])
def test_read_or_write_outside_is_refused(size: int, shift: int) -> None:
    with pytest.raises(Exception, match="outside the tensors of the launch"):
        copy(size, shift)


def test_atomic_outside_is_refused() -> None:
    counter: Any = torch.zeros(2, dtype=torch.int32)
    _add_kernel[(1,)](counter, 1)
    assert counter.tolist() == [0, 1]
    with pytest.raises(Exception, match="outside the tensors of the launch"):
        _add_kernel[(1,)](counter, 2)
