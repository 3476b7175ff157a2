"""Operations with a state: exact, and with the same bits for every way through the slots."""

from __future__ import annotations

import pytest
import torch

from engine.ops.kernels import Kernels
from tests.support import recurrent_checks as checks
from tests.support.recurrent_ops import OPERATIONS, Operation

pytestmark = pytest.mark.usefixtures("one_thread")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(params=["torch", "numba"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Run each test with torch and with Numba's kernels."""
    return request.param


@pytest.fixture(params=OPERATIONS)
def operation(request: pytest.FixtureRequest) -> Operation:
    return OPERATIONS[request.param]


@dtypes
def test_operation_matches_fp64(operation: Operation, dtype: torch.dtype, kernels: Kernels) -> None:
    checks.check_exact(operation, dtype, kernels, tokens=40)


@dtypes
def test_cut_text_equals_one_run_bitwise(
    operation: Operation, dtype: torch.dtype, kernels: Kernels
) -> None:
    checks.check_cuts(operation, dtype, kernels, checks.all_cuts())


@dtypes
def test_runs_of_other_sequences_do_not_change_bits(
    operation: Operation, dtype: torch.dtype, kernels: Kernels
) -> None:
    checks.check_batch(operation, dtype, kernels)


@dtypes
def test_text_behind_drafts_equals_one_run_bitwise(
    operation: Operation, dtype: torch.dtype, kernels: Kernels
) -> None:
    """Any number of the drafted tokens may be accepted."""
    checks.check_drafts(operation, dtype, kernels, accepted=range(1, 5))


def test_step_of_padding_writes_nothing(operation: Operation, kernels: Kernels) -> None:
    checks.check_padding(operation, kernels)


def test_inputs_with_row_strides_equal_contiguous_ones(
    operation: Operation, kernels: Kernels
) -> None:
    """Inputs are columns of a fused projection. Their heads and features are contiguous."""
    checks.check_strides(operation, kernels)
