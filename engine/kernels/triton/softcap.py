"""Softcap of logits in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.gated import tanh

BLOCK = 2048


@triton.jit
def _softcap_kernel(x_ptr, out_ptr, count, cap, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, at < count, 0.0).to(tl.float32)
    tl.store(out_ptr + at, tanh(x / cap) * cap, at < count)


def cap_softly(x: torch.Tensor, cap: float) -> torch.Tensor:
    """Return cap * tanh(x / cap) in fp32, in the shape of x."""
    x = x.contiguous()
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if x.numel():
        _softcap_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, out, x.numel(), cap, BLOCK)
    return out
