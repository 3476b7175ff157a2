"""Keys and values in 8 bits: a code for each number, and a scale for each token and KV head.

A number is code * scale. Codes are int8 or fp8 (e4m3, arXiv 2209.05433). A token's scale is the
largest magnitude of its head's numbers, divided by the largest code. So the stored bits of a token
depend on that token alone, and not on its batch or its chunk.

Scales are fp32. In fp16 they would overflow or vanish where bf16 numbers do not. With 64 numbers in
a head, a number takes 8.5 bits.
"""

from __future__ import annotations

import torch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # magnitude of a code
SCALE_BYTES = 4


def is_coded(dtype: torch.dtype) -> bool:
    """Whether numbers stored in this dtype are codes, which have scales."""
    return dtype in LARGEST


def to_codes(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Round values [..., D] to codes [..., D] of `dtype` with scales [...] fp32.

    If a number is NaN or infinite, the scale is too, and no number of its head stays finite.
    """
    largest = LARGEST[dtype]
    values = values.float()
    # A product, because a division by a constant has other bits on a GPU.
    scales = values.abs().amax(-1) * (1 / largest)
    divisors = scales.where(scales > 0, 1.0)
    quotients = (values / divisors.unsqueeze(-1)).nan_to_num(0.0).clamp(-largest, largest)
    if dtype == torch.int8:
        quotients = quotients.round()
    return quotients.to(dtype), scales


def from_codes(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """Write the numbers of codes [..., D] with scales [...] to `out` [..., D], in its dtype."""
    out.copy_(codes)
    out.mul_(scales.unsqueeze(-1))
