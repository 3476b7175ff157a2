"""Numbers of 4 bits (e2m1), and scales that are powers of two (e8m0).

Both are those of OCP's Microscaling (MX) specification, version 1.0.
"""

from __future__ import annotations

import torch

from engine.checkpoint.quantized.groups import Grouped

# Twice the number of each code, which is whole. The codes from 8 on are negative.
DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
BIAS = 127  # of a scale's exponent


def e2m1(packed: torch.Tensor, scales: torch.Tensor) -> Grouped:
    """Return the matrix of packed e2m1 codes with fp32 scales [outputs, groups].

    Packed codes are uint8 [outputs, inputs / 2]: the first of two inputs is in the lower four bits.
    Codes of the result are twice the numbers, and its scales are half of those given.
    """
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(1)
    negative = [-number for number in DOUBLED]
    table = torch.tensor([*DOUBLED, *negative], dtype=torch.int8)
    return Grouped(table[codes.int()], scales * 0.5)


def e8m0(exponents: torch.Tensor) -> torch.Tensor:
    """Return the scales in fp32 of exponents in uint8. The exponent 255 is NaN."""
    scales = torch.ldexp(torch.ones(exponents.shape), exponents.int() - BIAS)
    return scales.masked_fill(exponents == 255, torch.nan)
