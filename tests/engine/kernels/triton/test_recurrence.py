"""Kernels of recurrent layers: exact, and with the same bits for every way through the slots."""

from __future__ import annotations

import pytest
import torch

from tests.support import recurrent_checks as checks
from tests.support.interpreter import launches
from tests.support.recurrent_ops import Operation, Piece, conv, delta, scan

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
# Two tiles each, the second with a rest. The interpreter takes milliseconds for a token of a tile.
OPERATIONS = {
    "delta": delta(1, 1, 12, 10),
    "scan": scan(1, 1, 10, 12),
    "conv": conv(130, 4, bias=False, silu=True),
}
MORE = {
    "delta_grouped": delta(2, 2, 16, 8),
    "scan_grouped": scan(4, 2, 8, 16),
    "conv_bias": conv(20, 3, bias=True, silu=True),
    "conv_plain": conv(20, 2, bias=True, silu=False),
}
CUTS = [tuple(range(checks.TOKENS + 1)), (0, 1, 7, checks.TOKENS)]
HALVES = [torch.bfloat16, torch.float16]
operations = pytest.mark.parametrize(
    "operation",
    [
        *OPERATIONS.values(),
        *(pytest.param(operation, marks=pytest.mark.slow) for operation in MORE.values()),
    ],
    ids=[*OPERATIONS, *MORE],
)
dtypes = pytest.mark.parametrize(
    "dtype",
    [torch.float32, *(pytest.param(dtype, marks=pytest.mark.slow) for dtype in HALVES)],
    ids=str,
)


@operations
@dtypes
def test_kernel_matches_fp64(operation: Operation, dtype: torch.dtype) -> None:
    checks.check_exact(operation, dtype, "triton", tokens=11)


@operations
@dtypes
def test_kernel_gives_cut_text_the_bits_of_one_run(
    operation: Operation, dtype: torch.dtype
) -> None:
    checks.check_cuts(operation, dtype, "triton", CUTS)


@operations
@dtypes
def test_kernel_gives_runs_in_a_batch_their_own_bits(
    operation: Operation, dtype: torch.dtype
) -> None:
    checks.check_batch(operation, dtype, "triton")


@operations
@dtypes
def test_kernel_gives_text_behind_drafts_the_bits_of_one_run(
    operation: Operation, dtype: torch.dtype
) -> None:
    checks.check_drafts(operation, dtype, "triton", accepted=(1, 4))


@operations
def test_kernel_writes_nothing_for_padding(operation: Operation) -> None:
    checks.check_padding(operation, "triton")


@operations
def test_kernel_takes_inputs_with_row_strides(operation: Operation) -> None:
    checks.check_strides(operation, "triton")


@pytest.mark.parametrize("operation", OPERATIONS.values(), ids=OPERATIONS)
def test_operation_launches_one_kernel_only_with_triton(
    operation: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs, counted = operation.inputs(1, torch.float32), launches(monkeypatch)
    for kernels in ("torch", "numba", "triton"):
        assert not counted
        operation.run(inputs, [Piece(0, 1)], operation.states(0, torch.float32), kernels)
    assert counted.total() == 1
