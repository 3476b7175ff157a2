"""The rows of running sequences take the memory that a plan says."""

from __future__ import annotations

import torch

from engine.memory.estimate import NUMBER_BYTES, ROW_PARAMETER_BYTES
from engine.runner.sequence_rows import SequenceRows
from engine.scheduling.drafts import MOST_ROWS


def test_parameters_of_a_row_take_the_bytes_of_the_plan() -> None:
    rows = SequenceRows(3, 100, 16, (1, 1), torch.device("cpu"))
    with_padding = 4
    own = rows.tokens.nbytes + rows.block_tables.nbytes
    numbers = (MOST_ROWS + 1) * NUMBER_BYTES
    assert rows.num_bytes - own == with_padding * ROW_PARAMETER_BYTES + numbers
