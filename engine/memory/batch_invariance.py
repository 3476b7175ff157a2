"""Whether a row's bits are kept independent of the other rows on a CPU with AMX."""

from __future__ import annotations

import torch

from engine.ops.kernels import Kernels


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
