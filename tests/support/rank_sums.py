"""Buffers of several ranks in one process, for `engine/kernels/triton/rank_sum.py`."""

from __future__ import annotations

import torch

from engine.kernels.triton.rank_sum import SumBuffers, buffer_bytes, programs_of
from tests.support.interpreter import reached_by_address


class LocalBuffers:
    """The buffers of `ranks` ranks, which can all write to each other's memory."""

    def __init__(self, ranks: int, block_bytes: int) -> None:
        size = buffer_bytes(ranks, block_bytes)
        self.memory = [torch.zeros(size, dtype=torch.uint8) for _ in range(ranks)]
        reached_by_address[:] = self.memory
        peers = torch.tensor([memory.data_ptr() for memory in self.memory])
        programs = programs_of(block_bytes)
        self.of_ranks = [
            SumBuffers(own, peers, torch.zeros(programs, dtype=torch.int32), block_bytes)
            for own in range(ranks)
        ]
