"""Noise as a pure function of (seed, position, token): no generator, no state, no order.

The same request draws the same noise alone, in any batch, after preemption and on any device.
"""

from __future__ import annotations

import torch

# Odd multipliers of well-known integer finalisers (murmur3; the golden ratio for tokens), as the
# signed numbers of the same 32 bits.
_TOKEN = 0x9E3779B1 - (1 << 32)
_MIX_1 = 0x85EBCA6B - (1 << 32)
_MIX_2 = 0xC2B2AE35 - (1 << 32)


def _mix(h: torch.Tensor) -> torch.Tensor:
    """Murmur3's 32-bit finaliser, in place; int32 arithmetic wraps around by design."""
    h ^= _shifted(h, 16)
    h *= _MIX_1
    h ^= _shifted(h, 13)
    h *= _MIX_2
    h ^= _shifted(h, 16)
    return h


def _shifted(h: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift signed int32 numbers to the right as if they were unsigned."""
    kept = (1 << (32 - bits)) - 1
    return (h >> bits) & kept


def noise_bits(seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """31 random bits, int32 [R, K], for int64 seeds and positions [R]; `tokens` [K] or [R, K]."""
    low = seeds & 0xFFFFFFFF
    high = (seeds >> 32) & 0xFFFFFFFF
    key = _mix(_wrap(low + positions * 0x9E3779B1))
    key = _mix(key ^ _wrap(high))
    second_key = _mix(key + _TOKEN)
    bits = tokens.to(torch.int32) * _TOKEN
    bits = _mix(bits ^ key[:, None])
    bits = _mix(bits.add_(second_key[:, None]))
    return bits & 0x7FFFFFFF


def exponential_noise(
    seeds: torch.Tensor, positions: torch.Tensor, tokens: torch.Tensor
) -> torch.Tensor:
    """Exponential(1) draws, fp32 [R, K], of the same arguments.

    With weights p, argmax(p / draw) is a sample from p (the exponential form of the Gumbel-max
    trick).
    """
    bits = noise_bits(seeds, positions, tokens)
    # 31 bits, small values exact in fp32: the winners' draws are the small ones.
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-31)
    # The greatest uniforms round to 1, whose logarithm is no number to compare scores by.
    return torch.log1p(uniform.neg_()).neg_().clamp_(min=2.0**-33, max=32.0)


def _wrap(value: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of int64 as int32."""
    low = value & 0xFFFFFFFF
    return torch.where(low >= 1 << 31, low - (1 << 32), low).to(torch.int32)
