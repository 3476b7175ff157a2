"""Rotary position embedding in the rotate-half layout (arXiv 2104.09864, as Llama stores it)."""

from __future__ import annotations

import torch


def apply_rotary(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> torch.Tensor:
    """Rotate dimension i of each head against i + D/2 by the token's angle.

    `sin_T1D` carries the sign of its half (minus in the first), so that rotating the halves by a
    roll is all that is left: three operations instead of seven.
    """
    rolled = torch.roll(x_THD, x_THD.shape[-1] // 2, dims=-1)
    return torch.addcmul(x_THD * cos_T1D, rolled, sin_T1D)
