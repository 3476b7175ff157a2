"""Row-wise normalisation. The torch code is the reference every kernel is held against."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def rms_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, computed in fp32 (arXiv 1910.07467).

    Without a weight it only scales.
    """
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def offset_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * (1 + weight) in fp32, rounded to x's dtype at the very end (Gemma)."""
    return F.rms_norm(x.float(), (x.shape[-1],), 1.0 + weight.float(), eps).to(x.dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float
) -> torch.Tensor:
    """(x - mean) / std * weight + bias over the last dimension (arXiv 1607.06450)."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)
