"""The tasks of a step for Numba's attention, and memory that the inputs of several steps share."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.attention.backend import StepLayout
from engine.kernels.numba.call import TASK, TILE


class Task(NamedTuple):
    """The tokens of one sequence that a thread computes at a time; the fields of TASK."""

    sequence: int
    first_token: int
    num_tokens: int
    position: int  # of the first token
    num_keys: int  # of the sequence
    is_stored_ahead: bool


def step_tasks(layout: StepLayout, *, stores_chunks: bool) -> list[Task]:
    """Return the units of work of a step. Decodes come first, a task each.

    With `is_stored_ahead`, the task's KV is stored before any task attends. Tokens of a chunk need
    this because later ones read earlier ones, and with images also the reverse. A token that fills
    a block needs it because another sequence of this step may read the block as a cached prefix.
    With drafts, any token is read by the sequences behind it. The KV of any other single token is
    read only by its own task, which stores it and so loads the block once. With `stores_chunks`,
    the KV of every chunk is stored ahead.
    """
    assert layout.query_lens is not None, "the numba backend does not capture steps"
    assert layout.seq_lens is not None
    size = layout.block_size
    tasks = []
    first_token = 0
    for sequence, (count, length) in enumerate(
        zip(layout.query_lens, layout.seq_lens, strict=True)
    ):
        is_stored_chunk = stores_chunks and sequence >= layout.num_decodes
        for done in range(0, count, TILE):
            num_tokens = min(TILE, count - done)
            position = length - count + done
            fills_block = (position + 1) % size == 0
            is_read = layout.has_drafts or layout.last_keys is not None
            is_ahead = is_read or is_stored_chunk or num_tokens > 1 or fills_block
            first = first_token + done
            tasks.append(Task(sequence, first, num_tokens, position, length, is_ahead))
        first_token += count
    return tasks


def padding_tasks(layout: StepLayout, count: int) -> npt.NDArray[np.void]:
    """Return the tasks of `count` tokens of padding behind the others.

    Each is the first token of a sequence in the null block, so that its results are finite.
    """
    assert layout.query_lens is not None
    sequence, first = len(layout.query_lens), sum(layout.query_lens)
    tasks = [Task(sequence, first + index, 1, 0, 1, False) for index in range(count)]
    return np.array(tasks, dtype=TASK)


class PlanMemory:
    """Memory for the inputs of a step of up to R tokens. Recorded steps share it."""

    def __init__(self, like: StepLayout, rows: int, blocks: int) -> None:
        """`like` is a layout with the same KV groups; tables have room for `blocks` blocks."""
        self.tasks = np.zeros(rows, dtype=TASK)  # [R]
        groups = range(len(like.groups))
        # The system gives a page of zeros when it is first written.
        self._tables = [torch.zeros(rows, blocks, dtype=torch.int64) for _ in groups]
        self._blocks = [torch.zeros(rows, dtype=torch.int64) for _ in groups]
        self._offsets = torch.zeros(rows, dtype=torch.int64)

    def layout(self, like: StepLayout, rows: int) -> StepLayout:
        """Return a layout of `rows` tokens in this memory, for `copy_layout`."""
        groups = [
            replace(group, block_tables=tables, token_blocks=blocks[:rows])
            for group, tables, blocks in zip(like.groups, self._tables, self._blocks, strict=True)
        ]
        offsets = self._offsets[:rows]
        return replace(like, query_lens=None, seq_lens=None, groups=groups, token_offsets=offsets)


def copy_layout(own: StepLayout, given: StepLayout) -> None:
    """Copy tables, blocks and offsets. Rows behind those given are in the null block."""
    tokens, padded = len(given.token_offsets), len(own.token_offsets)
    own.token_offsets[:tokens].copy_(given.token_offsets)
    own.token_offsets[tokens:padded].zero_()
    for group, new in zip(own.groups, given.groups, strict=True):
        group.token_blocks[:tokens].copy_(new.token_blocks)
        group.token_blocks[tokens:padded].zero_()
        sequences, width = new.block_tables.shape
        group.block_tables[:sequences, :width].copy_(new.block_tables)
        if tokens < padded:
            group.block_tables[sequences, 0] = 0
