"""Rotary position embedding (arXiv 2104.09864), in either layout of the pairs it rotates."""

from __future__ import annotations

import torch


def apply_rotary(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotate dimension i of each head against i + D/2, as Llama stores them, by the token's angle.

    `sin_T1D` carries the sign of its half (minus in the first), so that rotating the halves by a
    roll is all that is left: three operations instead of seven.
    """
    rolled = torch.roll(x_THD, x_THD.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_THD * cos_T1D, rolled, sin_T1D)


def apply_rotary_pairs(
    x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor
) -> torch.Tensor:
    """Rotate dimension 2i of each head against 2i + 1, as the paper has it.

    `sin_T1D` carries the sign (minus in the even dimensions).
    """
    swapped = x_THD.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return torch.addcmul(x_THD * cos_T1D, swapped, sin_T1D)
