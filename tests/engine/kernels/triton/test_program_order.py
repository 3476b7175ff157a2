"""Programs of the interpreter in a seeded order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tests.support.program_order import program_order

GRID = (2, 3, 4)


@triton.jit
def _note_order(count_ptr, turns_ptr):
    y, z = tl.num_programs(1), tl.num_programs(2)
    program = (tl.program_id(0) * y + tl.program_id(1)) * z + tl.program_id(2)
    tl.store(turns_ptr + program, tl.atomic_add(count_ptr, 1))


def turns() -> list[int]:
    """Return the turn of each program of one launch."""
    count = torch.zeros(1, dtype=torch.int32)
    found = torch.full((24,), -1, dtype=torch.int32)
    _note_order[GRID](count, found)
    assert count.item() == 24
    return found.tolist()


def test_program_order_is_a_new_permutation_for_each_launch_and_seed() -> None:
    with program_order(0) as orders:
        first, second = turns(), turns()
    with program_order(0):
        again = turns()
    with program_order(1):
        other = turns()
    for found, order in zip((first, second), orders, strict=True):
        assert sorted(found) == list(range(24))
        assert [found[program] for program in order] == list(range(24))
    assert again == first
    assert len({tuple(found) for found in (first, second, other)}) == 3
    assert turns() == list(range(24)), "the order ends with the context"
