"""The kernel that gathers a captured step's inputs, against torch."""

from __future__ import annotations

import pytest
import torch

from engine.ops.sequence_rows import gather_decode_inputs

pytestmark = pytest.mark.usefixtures("one_thread", "poisoned")
ROWS, LENGTH, SIZE = 9, 100, 16


def state(groups: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, lengths and block tables; the last row is padding.

    The lengths range from 1 to LENGTH, with values around multiples of the block size.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 500, (ROWS, LENGTH + 1), generator=generator, dtype=torch.int32)
    lengths = torch.tensor([1, 2, SIZE, SIZE + 1, 2 * SIZE, 50, 99, LENGTH, 1], dtype=torch.int32)
    tables = torch.randint(1, 50, (groups, ROWS, -(-LENGTH // SIZE)), generator=generator)
    tables[:, -1] = 0
    return tokens, lengths, tables


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("row_ids", [[4], [0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8], [7, 0, 8]], ids=str)
def test_gather_inputs_kernel_equals_torch(row_ids: list[int], groups: int) -> None:
    ids, held = torch.tensor(row_ids), state(groups)
    ahead = torch.tensor([index % 2 for index, row in enumerate(row_ids)])
    ahead[ids == ROWS - 1] = 0
    due = gather_decode_inputs(ids, ahead, *held, SIZE, kernels="torch")
    found = gather_decode_inputs(ids, ahead, *held, SIZE, kernels="triton")
    assert torch.equal(due.lengths, held[1][ids] + ahead)
    for name, one, other in zip(due._fields, found, due, strict=True):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    assert all(map(torch.equal, held, state(groups)))


def test_gather_inputs_kernel_copies_wide_tables() -> None:
    """The tables have more entries than one program copies at a time."""
    tables = torch.arange(2 * 3 * 1500).view(2, 3, 1500)
    tokens, lengths = torch.zeros(3, 24_001, dtype=torch.int32), torch.tensor([24_000, 5, 1]).int()
    row_ids, ahead = torch.tensor([1, 0]), torch.zeros(2, dtype=torch.int64)
    found = gather_decode_inputs(row_ids, ahead, tokens, lengths, tables, SIZE, kernels="triton")
    assert torch.equal(found.block_tables, tables[:, [1, 0]])
    assert found.blocks.tolist() == [[1500, 1499], [6000, 5999]]
