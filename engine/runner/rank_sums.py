"""Sums of ranks on GPUs in one launch, in place of NCCL's where they are small."""

from __future__ import annotations

import logging

import torch

from engine.device.ranks import Ranks
from engine.device.symmetric import SymmetricBuffer, symmetric_buffer
from engine.device.topology import have_peer_access
from engine.kernels.triton.rank_sum import (
    LIMIT,
    SumBuffers,
    buffer_bytes,
    programs_of,
    rank_sum,
    rank_sum_norm,
)

log = logging.getLogger(__name__)

NO_PEERS = (
    "The GPUs cannot write to each other's memory. NCCL adds small sums, too, which takes longer, "
    "and their bits may depend on the other requests in a step."
)


class OneShotSums:
    """The buffers of this rank's sums: for blocks of any tensor, and for rows that are normed."""

    def __init__(self, ranks: Ranks, device: torch.device, block_bytes: list[int]) -> None:
        """`block_bytes` are those of `engine.memory.rank_plan.sum_blocks`.

        Raises RuntimeError if the GPUs cannot share memory.
        """
        self._memory: list[SymmetricBuffer] = []
        buffers = [self._buffers(ranks, device, each) for each in block_bytes]
        self._blocks = buffers[0]
        self._rows = buffers[1] if len(buffers) > 1 else None

    def _buffers(self, ranks: Ranks, device: torch.device, block_bytes: int) -> SumBuffers:
        name = f"penstock-sums-{len(self._memory)}"
        size = buffer_bytes(ranks.count, block_bytes)
        buffer = symmetric_buffer(name, ranks.store, ranks.own, ranks.count, size, device)
        self._memory.append(buffer)
        peers = torch.tensor(buffer.addresses, dtype=torch.int64, device=device)
        numbers = torch.zeros(programs_of(block_bytes), dtype=torch.int32, device=device)
        return SumBuffers(ranks.own, peers, numbers, block_bytes)

    @property
    def num_bytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in self._memory)

    def sum(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the sum of all ranks' x, or None if it is too large."""
        return rank_sum(x, self._blocks) if x.nbytes <= LIMIT else None

    def add_norm(
        self,
        x: torch.Tensor,
        delta: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        offset: bool,
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return x plus the sum of all ranks' delta, and its RMS norm, or None if there are too
        many rows."""
        if self._rows is None or len(delta) > self._rows.programs:
            return None
        return rank_sum_norm(x, delta, weight, eps, self._rows, offset=offset)


def start_one_shot_sums(ranks: Ranks, device: torch.device, block_bytes: list[int]) -> bool:
    """Let this rank add small sums in one launch. Returns False if the GPUs cannot.

    All ranks call this after they have connected, and make the same decision.
    """
    sums: OneShotSums | None = None
    gpus = tuple(gpu for (gpu,) in ranks.numbers([device.index or 0], device))
    try:
        if have_peer_access(gpus):
            sums = OneShotSums(ranks, device, block_bytes)
    except (RuntimeError, AttributeError, TypeError) as error:  # torch's functions are private
        log.info("symmetric memory: %s", error)
    if not all(works for (works,) in ranks.numbers([int(sums is not None)], device)):
        log.warning(NO_PEERS)
        return False
    ranks.one_shot = sums
    return True
