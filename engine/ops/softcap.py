"""Softcap: a smooth bound on logits (Gemma 2, arXiv 2408.00118)."""

from __future__ import annotations

import torch

from engine.ops.kernels import Kernels


def softcap(
    x: torch.Tensor, cap: float, out: torch.Tensor | None = None, *, kernels: Kernels
) -> torch.Tensor:
    """Return cap * tanh(x / cap) in fp32: close to x near zero, and never beyond the cap.

    The result is `out` if it is given, which may be x.
    """
    if kernels == "triton":
        from engine.kernels.triton.softcap import cap_softly

        return cap_softly(x, cap, out)
    return torch.mul(torch.tanh(x.float() / cap), cap, out=out)
