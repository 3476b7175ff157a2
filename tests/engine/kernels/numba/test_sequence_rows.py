"""Numba's kernels for the rows of a decode step return what torch's operations do."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.attention.backend import StepLayout
from engine.attention.numba_tasks import step_tasks
from engine.device.openmp import parallel
from engine.kernels.numba.call import TASK
from engine.kernels.numba.sequence_rows import decode_tasks, draw_params
from engine.ops.sequence_rows import append, gather_decode_inputs
from engine.sampling.sampler import DrawParams

pytestmark = pytest.mark.skipif(parallel() is None, reason="this torch has no OpenMP threads")

SIZE, LENGTH, ROWS = 16, 100, 9
PADDING = ROWS - 1
LENGTHS = [1, 2, SIZE, SIZE + 1, 2 * SIZE, 50, 99, LENGTH, 1]
# Row 0 has two drafted tokens. The padding row occurs twice.
ENTRIES = [(6, 0), (0, 0), (0, 1), (0, 2), (PADDING, 0), (3, 0), (2, 0), (PADDING, 0)]


def entries() -> tuple[torch.Tensor, torch.Tensor]:
    row_ids, ahead = torch.tensor(ENTRIES).T.contiguous()
    return row_ids, ahead


def known_tokens() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens [N, L] of the rows, and how many are known."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, 500, (ROWS, LENGTH + 1), generator=generator, dtype=torch.int32)
    return tokens, torch.tensor(LENGTHS, dtype=torch.int32)


@pytest.mark.parametrize("groups", [1, 3])
def test_gathered_inputs_equal_torch(groups: int) -> None:
    """Of block tables, the entries up to the token's own."""
    row_ids, ahead = entries()
    tables = torch.arange(groups * ROWS * 7).view(groups, ROWS, 7) + 1
    held = *known_tokens(), tables
    due = gather_decode_inputs(row_ids, ahead, *held, SIZE, kernels="torch")
    found = gather_decode_inputs(row_ids, ahead, *held, SIZE, kernels="numba")
    for name, one, other in zip(due._fields[:-1], found, due, strict=False):
        assert one.dtype == other.dtype, name
        assert torch.equal(one, other), name
    for index, length in enumerate(due.lengths.tolist()):
        entry = -(-length // SIZE)
        own = found.block_tables[:, index, :entry]
        assert torch.equal(own, due.block_tables[:, index, :entry])


def test_tasks_equal_those_of_the_host() -> None:
    lengths = [1, SIZE - 1, SIZE, SIZE + 1, 5 * SIZE]
    known = torch.tensor(lengths, dtype=torch.int32)
    numbers = torch.arange(len(lengths))
    layout = StepLayout(
        len(lengths), [1] * len(lengths), lengths, known, numbers, [], numbers, numbers, SIZE
    )
    due = np.array(step_tasks(layout, stores_chunks=False), dtype=TASK)
    assert due["is_stored_ahead"].tolist() == [0, 0, 1, 0, 1]
    planned, reading = decode_tasks(known, SIZE).numpy().view(TASK)[..., 0]
    assert planned.tolist() == due.tolist()
    due["is_stored_ahead"] = 1
    assert reading.tolist() == due.tolist()


def test_gathered_parameters_equal_torch() -> None:
    row_ids, ahead = entries()
    numbers = torch.arange(ROWS)
    _, lengths = known_tokens()
    filters = numbers / 7, numbers.int() + 3, numbers / 11, numbers / 13
    rows = DrawParams(*filters, seeds=numbers * 2**33 - numbers, positions=lengths)
    due = rows.select(row_ids)
    due = due._replace(positions=due.positions + ahead)
    for name, found, expected in zip(
        due._fields, draw_params(row_ids, ahead, *rows), due, strict=True
    ):
        assert found.dtype == expected.dtype, name
        assert torch.equal(found, expected), name


def test_appended_tokens_equal_torch() -> None:
    """A failed draw is stored as 0. Tokens behind drafted ones are stored and not counted."""
    row_ids, ahead = entries()
    new = torch.tensor([7, 8, 9, 10, 11, -1, 2**20, 11])
    (due, due_lengths), (found, lengths) = known_tokens(), known_tokens()
    positions = lengths[row_ids] + ahead
    append(row_ids, positions, ahead, new, due, due_lengths, PADDING, kernels="torch")
    append(row_ids, positions, ahead, new, found, lengths, PADDING, kernels="numba")
    assert torch.equal(found, due)
    assert torch.equal(lengths, due_lengths)
    assert found[3, SIZE + 1] == 0
    assert lengths.tolist() == [2, 2, SIZE + 1, SIZE + 2, 2 * SIZE, 50, 100, LENGTH, 1]
