"""Softcap: a smooth bound on logits (Gemma 2, arXiv 2408.00118)."""

from __future__ import annotations

import torch

from engine.ops.kernels import Kernels


def softcap(x: torch.Tensor, cap: float, *, kernels: Kernels) -> torch.Tensor:
    """Return cap * tanh(x / cap) in fp32: close to x near zero, and never beyond the cap."""
    if kernels == "triton":
        from engine.kernels.triton.softcap import cap_softly

        return cap_softly(x, cap)
    return torch.tanh(x.float() / cap) * cap
