"""The memory that several ranks on GPUs take besides their shares of the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kernels.triton.chips import features_of
from engine.models.llama import Llama

if TYPE_CHECKING:
    from engine.memory.model_plan import ModelPlan

# Buffers of NCCL on each GPU, and its kernels: a guess. The banner shows the measured size, too.
NCCL_BYTES = 512 << 20


def nccl_bytes(plan: ModelPlan) -> int:
    """Estimate what NCCL takes of this rank's GPU."""
    return NCCL_BYTES if plan.ranks.count > 1 and plan.device.type == "cuda" else 0


def sums_at_once(plan: ModelPlan) -> bool:
    """Whether ranks add small tensors in one launch, if their GPUs can share memory."""
    several = plan.ranks.count > 1 and plan.device.type == "cuda"
    return several and plan.kernels == "triton" and features_of(plan.device).rank_sums


def sum_blocks(plan: ModelPlan) -> list[int]:
    """Return the bytes of a program of each kind of sum: of any tensor, and of normed rows.

    Empty if NCCL adds everything.
    """
    if not sums_at_once(plan):
        return []
    from engine.kernels.triton.rank_sum import BLOCK_BYTES, MAX_ROW_BYTES

    blocks = [BLOCK_BYTES]
    if isinstance(plan.module, Llama):
        row_bytes = (1 << (plan.module.config.hidden - 1).bit_length()) * plan.dtype.itemsize
        if row_bytes <= MAX_ROW_BYTES:
            blocks.append(row_bytes)
    return blocks


def sum_bytes(plan: ModelPlan) -> int:
    """Return the size of this rank's buffers of sums."""
    blocks = sum_blocks(plan)
    if not blocks:
        return 0
    from engine.kernels.triton.rank_sum import buffer_bytes

    return sum(buffer_bytes(plan.ranks.count, block) for block in blocks)
