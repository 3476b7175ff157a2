"""Checks of operations with a state: exact, and equal bits for every way through the slots."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import torch

from engine.ops.kernels import Kernels
from tests.support.recurrent_ops import Operation, Piece, Tensors, runs_of

TOKENS = 9
# Of the largest result. The interpreter truncates bf16 where a GPU rounds.
ERROR = {torch.float32: 4e-7, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def check_exact(operation: Operation, dtype: torch.dtype, kernels: Kernels, tokens: int) -> None:
    """Compare with fp64. Sums of logarithms of the decays would lose 7e-6 if decays are strong."""
    inputs = operation.inputs(tokens, dtype)
    states = operation.states(0, dtype)
    found, _ = operation.run(inputs, [Piece(0, tokens)], states, kernels)
    assert found.dtype == dtype
    exact = operation.exact(inputs)
    error = (found.double() - exact).abs().max() / exact.abs().max()
    assert error < ERROR[dtype]


@cache
def whole(
    operation: Operation, dtype: torch.dtype, kernels: Kernels
) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
    """Return inputs, the results of one run, and the state behind each of its tokens."""
    inputs = operation.inputs(TOKENS, dtype)
    states = operation.states(TOKENS, dtype)
    piece = Piece(0, TOKENS, drafts=tuple(range(1, TOKENS + 1)))
    found, _ = operation.run(inputs, [piece], states, kernels)
    assert found.unique().numel() > TOKENS
    return inputs, found, states


def all_cuts() -> list[tuple[int, ...]]:
    """Return single tokens, all cuts into two pieces, and some into three."""
    once = [(0, place, TOKENS) for place in range(1, TOKENS)]
    twice = [(0, *places, TOKENS) for places in itertools.combinations(range(1, TOKENS), 2)]
    return [tuple(range(TOKENS + 1)), *once, *twice[::5]]


def check_cuts(
    operation: Operation, dtype: torch.dtype, kernels: Kernels, cuts: Sequence[tuple[int, ...]]
) -> None:
    """Let each piece read the slot that the piece before wrote, the same slot or another one."""
    inputs, due, after = whole(operation, dtype, kernels)
    for cut in cuts:
        states, read = operation.states(2, dtype), 0
        for start, end in itertools.pairwise(cut):
            write = 1 + start % 2
            [found, _] = operation.run(inputs, [Piece(start, end, read, write)], states, kernels)
            assert torch.equal(found, due[start:end]), cut
            assert torch.equal(states[write], after[end]), cut
            read = write
        assert not states[0].any()


def check_batch(operation: Operation, dtype: torch.dtype, kernels: Kernels) -> None:
    """Compute chunks, decodes, drafted tokens, empty runs and padding in one step."""
    inputs, due, after = whole(operation, dtype, kernels)
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


def check_drafts(
    operation: Operation, dtype: torch.dtype, kernels: Kernels, accepted: Sequence[int]
) -> None:
    """Go on behind each number of `accepted` tokens out of four drafted ones."""
    inputs, due, after = whole(operation, dtype, kernels)
    for count in accepted:
        states = operation.states(5, dtype)
        states[5] = after[3]
        operation.run(inputs, [Piece(3, 7, 5, drafts=(1, 2, 3, 4))], states, kernels)
        rest = Piece(3 + count, TOKENS, count, count)
        [found, _] = operation.run(inputs, [rest], states, kernels)
        assert torch.equal(found, due[3 + count :])
        assert torch.equal(states[count], after[TOKENS])


def check_padding(operation: Operation, kernels: Kernels) -> None:
    """Compute a step of padding alone."""
    inputs = operation.inputs(TOKENS, torch.float32)
    states = operation.states(2, torch.float32)
    operation.run(inputs, [Piece(0, 0), Piece(5, 5, 1)], states, kernels, padding=4)
    assert states[1:].isnan().all()
    assert not states[0].any()


def check_strides(operation: Operation, kernels: Kernels) -> None:
    """Compare columns of a fused projection with contiguous inputs, which are not changed."""
    inputs = operation.inputs(TOKENS, torch.float32)
    assert not inputs[0].is_contiguous()
    runs = runs_of([Piece(0, 5), Piece(5, TOKENS)], 0)
    copies = tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs)
    assert all(tensor.is_contiguous() for tensor in copies)
    found, due = (
        operation.call(each, operation.states(0, torch.float32), runs, kernels)
        for each in (inputs, copies)
    )
    assert torch.equal(found, due)
    assert all(map(torch.equal, inputs, copies))
