"""Operations with a state: exact, and with the same bits for every way through the slots."""

from __future__ import annotations

import itertools

import pytest
import torch

from engine.ops.kernels import Kernels
from tests.support.recurrent_ops import OPERATIONS, Operation, Piece, Tensors, runs_of

pytestmark = pytest.mark.usefixtures("one_thread")
TOKENS = 9
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)


@pytest.fixture(params=["torch", "numba"], autouse=True)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """Run each test with torch's reference."""
    return request.param


@pytest.fixture(params=OPERATIONS)
def operation(request: pytest.FixtureRequest) -> Operation:
    return OPERATIONS[request.param]


def whole(
    operation: Operation, inputs: Tensors, dtype: torch.dtype, kernels: Kernels
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the results of one run, and the state behind each of its tokens."""
    states = operation.states(TOKENS, dtype)
    piece = Piece(0, TOKENS, drafts=tuple(range(1, TOKENS + 1)))
    found, _ = operation.run(inputs, [piece], states, kernels)
    assert found.unique().numel() > TOKENS
    return found, states


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_operation_matches_fp64(operation: Operation, dtype: torch.dtype, kernels: Kernels) -> None:
    """Sums of logarithms of the decays would lose 7e-6 where decays are strong."""
    inputs = operation.inputs(40, dtype)
    found, _ = operation.run(inputs, [Piece(0, 40)], operation.states(0, dtype), kernels)
    assert found.dtype == dtype
    exact = operation.exact(inputs)
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert error < (4e-7 if dtype == torch.float32 else 4e-3)


@dtypes
def test_cut_text_equals_one_run_bitwise(
    operation: Operation, dtype: torch.dtype, kernels: Kernels
) -> None:
    """Each piece reads the slot that the piece before wrote. It is the same slot or another one."""
    inputs = operation.inputs(TOKENS, dtype)
    due, after = whole(operation, inputs, dtype, kernels)
    cuts = [tuple(range(TOKENS + 1)), *((0, *each, TOKENS) for each in cuts_of(TOKENS))]
    for cut in cuts:
        states, read = operation.states(2, dtype), 0
        for start, end in itertools.pairwise(cut):
            write = 1 + start % 2
            [found, _] = operation.run(inputs, [Piece(start, end, read, write)], states, kernels)
            assert torch.equal(found, due[start:end]), cut
            assert torch.equal(states[write], after[end]), cut
            read = write
        assert not states[0].any()


def cuts_of(count: int) -> list[tuple[int, ...]]:
    """Return all cuts into two pieces, and some into three."""
    twice = itertools.combinations(range(1, count), 2)
    return [(place,) for place in range(1, count)] + list(twice)[::5]


@dtypes
def test_runs_of_other_sequences_do_not_change_bits(
    operation: Operation, dtype: torch.dtype, kernels: Kernels
) -> None:
    """A chunk, a decode, drafted tokens and an empty run share a step."""
    inputs = operation.inputs(TOKENS, dtype)
    due, after = whole(operation, inputs, dtype, kernels)
    states = operation.states(9, dtype)
    states[1], states[2], states[3], states[4] = after[4], after[8], after[2], after[1]
    pieces = [
        Piece(4, 7, read=1, write=1),
        Piece(2, 2, read=3, write=5),
        Piece(8, 9, read=2, write=6),
        Piece(0, 3),
        Piece(3, 3),
        Piece(2, 5, read=3, drafts=(7, 8, 9)),
        Piece(1, 2, read=4, write=4),
    ]
    found = operation.run(inputs, pieces, states, kernels, padding=3)
    for piece, part in zip(pieces, found, strict=False):
        assert torch.equal(part, due[piece.start : piece.end]), piece
    for slot, count in {1: 7, 2: 8, 3: 2, 4: 2, 6: 9, 7: 3, 8: 4, 9: 5}.items():
        assert torch.equal(states[slot], after[count]), slot
    assert states[5].isnan().all(), "an empty run wrote"
    assert not states[0].any()


@dtypes
def test_text_behind_drafts_equals_one_run_bitwise(
    operation: Operation, dtype: torch.dtype, kernels: Kernels
) -> None:
    """Any number of the drafted tokens may be accepted."""
    inputs = operation.inputs(TOKENS, dtype)
    due, after = whole(operation, inputs, dtype, kernels)
    for accepted in range(1, 5):
        states = operation.states(5, dtype)
        states[5] = after[3]
        operation.run(inputs, [Piece(3, 7, 5, drafts=(1, 2, 3, 4))], states, kernels)
        [found, _] = operation.run(
            inputs, [Piece(3 + accepted, TOKENS, accepted, accepted)], states, kernels
        )
        assert torch.equal(found, due[3 + accepted :])
        assert torch.equal(states[accepted], after[TOKENS])


def test_step_of_padding_writes_nothing(operation: Operation, kernels: Kernels) -> None:
    inputs = operation.inputs(TOKENS, torch.float32)
    states = operation.states(2, torch.float32)
    operation.run(inputs, [Piece(0, 0), Piece(5, 5, 1)], states, kernels, padding=4)
    assert states[1:].isnan().all()
    assert not states[0].any()


def test_inputs_with_row_strides_equal_contiguous_ones(
    operation: Operation, kernels: Kernels
) -> None:
    """Inputs are columns of a fused projection. Their heads and features are contiguous."""
    inputs = operation.inputs(TOKENS, torch.bfloat16)
    assert not inputs[0].is_contiguous()
    pieces = [Piece(0, 5), Piece(5, TOKENS)]
    copies = tuple(tensor.clone() for tensor in inputs)
    runs = [
        operation.call(each, operation.states(0, torch.bfloat16), runs_of(pieces, 0), kernels)
        for each in (inputs, tuple(tensor.contiguous() for tensor in inputs))
    ]
    assert torch.equal(*runs)
    assert all(map(torch.equal, inputs, copies)), "an input was changed"
