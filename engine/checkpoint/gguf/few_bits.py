"""Encodings of 1 to 3 bits with evenly spaced numbers: K-quants, ternary numbers and bits."""

from __future__ import annotations

import torch

from engine.checkpoint.gguf.groups import (
    Groups,
    bits,
    half,
    pairs_of_bits,
    scales_and_offsets,
    signed,
)
from engine.ops.quantize import GROUP

POWERS = (1, 3, 9, 27, 81)


def q2_k(raw: torch.Tensor) -> Groups:
    """Groups of 16. A byte has the scale of one in its low half, and the minimum in the other."""
    codes = pairs_of_bits(raw[:, 16:80].unflatten(1, (2, 32)))
    scale, offset = scales_and_offsets(raw[:, 80:])
    scales, minimums = (raw[:, :16] & 15).float(), (raw[:, :16] >> 4).float()
    return Groups(signed(codes).view(-1, 16, 16), scale * scales, -offset * minimums)


def q3_k(raw: torch.Tensor) -> Groups:
    """Groups of 16."""
    codes, factors = _codes_and_factors(raw)
    return Groups(codes, half(raw[:, 108:]) * factors)


def q3_k_in_32(raw: torch.Tensor) -> Groups:
    """The same numbers with one scale for all: codes times factors are whole and fit 8 bits.

    They are from -124 to 128, so their negatives are stored, with a negative scale.
    """
    codes, factors = _codes_and_factors(raw)
    products = (codes * -factors[..., None]).view(-1, 8, GROUP)
    return Groups(products, -half(raw[:, 108:]).expand(-1, 8))


def _codes_and_factors(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes from -4 to 3 [n, 16, 16] and factors from -32 to 31 [n, 16], int8."""
    shifts = torch.arange(8, dtype=torch.uint8)[:, None]
    high = (raw[:, None, :32] >> shifts & 1) << 2
    low = pairs_of_bits(raw[:, 32:96].unflatten(1, (2, 32))).view(-1, 8, 32)
    codes = signed(low | high).view(-1, 16, 16) - 4
    packed = raw[:, 96:108]
    low_parts = torch.cat((packed[:, :8] & 15, packed[:, :8] >> 4), 1)
    high_parts = pairs_of_bits(packed[:, None, 8:]).flatten(1)
    return codes, signed(low_parts | high_parts << 4) - 32


def tq1_0(raw: torch.Tensor) -> Groups:
    """Five digits of base 3 in a byte, as a fraction of 256: three times it has a digit on top."""
    parts = ((raw[:, :32], POWERS), (raw[:, 32:48], POWERS), (raw[:, 48:52], POWERS[:4]))
    digits = []
    for part, powers in parts:
        shifted = part[:, None, :] * torch.tensor(powers, dtype=torch.uint8)[:, None]  # wraps
        digits.append((shifted.short() * 3 >> 8).flatten(1))
    codes = torch.cat(digits, 1).to(torch.int8) - 1
    return Groups(codes[:, None], half(raw[:, 52:]))


def tq2_0(raw: torch.Tensor) -> Groups:
    codes = pairs_of_bits(raw[:, :64].unflatten(1, (2, 32))).view(-1, 1, 256)
    return Groups(signed(codes) - 1, half(raw[:, 64:]))


def q1_0(raw: torch.Tensor) -> Groups:
    """A set bit is the scale, another its negative."""
    codes = signed(bits(raw[:, 2:])) * 2 - 1
    return Groups(codes[:, None], half(raw[:, :2]))


def q2_0(raw: torch.Tensor) -> Groups:
    """Numbers from -1 to 2 scales, four in a byte."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)
    codes = (raw[:, 2:, None] >> shifts & 3).flatten(1)
    return Groups(signed(codes)[:, None] - 1, half(raw[:, :2]))
