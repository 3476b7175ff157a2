"""Softcap of logits in one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.gated import tanh

BLOCK = 2048


@triton.jit
def _softcap_kernel(x_ptr, out_ptr, count, cap, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    x = tl.load(x_ptr + at, mask, 0.0).to(tl.float32)
    capped = tanh(x / cap) * cap
    tl.store(out_ptr + at, capped, mask)


def cap_softly(x: torch.Tensor, cap: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return cap * tanh(x / cap) in fp32, in the shape of x: in the dense `out`, if it is given."""
    x = x.contiguous()
    if out is None:
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    count = x.numel()
    if count:
        blocks = triton.cdiv(count, BLOCK)
        _softcap_kernel[(blocks,)](x, out, count, cap, BLOCK)
    return out
