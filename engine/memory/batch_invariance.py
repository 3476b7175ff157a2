"""Whether a row's bits are independent of the other rows, and kept so on a CPU with AMX."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.device.facts import batch_variance_of
from engine.errors import ConfigError
from engine.ops.kernels import Kernels
from engine.protocol.ready import BATCH_VARIANCE, BatchVariance

if TYPE_CHECKING:
    from engine.memory.model_plan import ModelPlan


def check_variance(plan: ModelPlan) -> BatchVariance:
    """Return why bits depend on the batch; None if they do not.

    Raises ConfigError if they do, and `--batch-invariant on` forbids it.
    """
    variance = batch_variance_of(
        plan.device, plan.dtype, packed=plan.prepacks, threads=plan.threads
    )
    if plan.config.batch_invariant == "on" and variance:
        why, cure = BATCH_VARIANCE[variance]
        raise ConfigError(f"--batch-invariant on is not possible: {why}. Instead, {cure}.")
    return variance


def multiplies_in_tiles(dtype: torch.dtype, kernels: Kernels) -> bool:
    """Return whether our kernel of linear layers uses AMX: a row's bits are fixed, at full speed.

    The first call in a process decides, so it comes before `forbid_amx`.
    """
    if kernels != "numba" or dtype != torch.bfloat16:
        return False
    from engine.kernels.numba.linear import tiles_problem

    return tiles_problem() is None


def keeps_order(batch_invariant: str, *, in_tiles: bool) -> bool:
    """Return whether oneDNN and torch's attention go without AMX, which would change the order.

    `batch_invariant` is the flag. With `auto`, they do if our own kernel uses AMX for them.
    """
    return batch_invariant == "on" or (batch_invariant == "auto" and in_tiles)


def amx_note(dtype: torch.dtype, kernels: Kernels) -> str:
    """Return why linear layers do not use AMX on a CPU that has it; empty if they do."""
    if kernels != "numba" or dtype != torch.bfloat16:
        return ""
    from engine.kernels.numba.linear import tiles_note

    return tiles_note() or ""
