"""Encodings of 4 bits that are indices of a table of 16 numbers."""

from __future__ import annotations

import torch

from engine.checkpoint.gguf.groups import Groups, half, halves_of_bytes, nibbles

# Of ggml's ggml-common.h: the numbers of IQ4_NL and IQ4_XS, and twice those of e2m1.
UNEVEN = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
NOT_A_NUMBER = 0x7F  # of the scales of NVFP4; ggml reads it as 0


def iq4_nl(raw: torch.Tensor) -> Groups:
    return Groups(_looked_up(UNEVEN, nibbles(raw[:, 2:]))[:, None], half(raw[:, :2]))


def iq4_xs(raw: torch.Tensor) -> Groups:
    """Two bits of each scale are in a word, and four in half a byte."""
    high = raw[:, 2:4, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3
    low = halves_of_bytes(raw[:, 4:8])
    scales = (low | high.flatten(1) << 4).float() - 32
    codes = _looked_up(UNEVEN, nibbles(raw[:, 8:].unflatten(1, (8, 16))))
    return Groups(codes, half(raw[:, :2]) * scales)


def mxfp4(raw: torch.Tensor) -> Groups:
    """The scale is a power of two by its exponent. The two smallest ones are subnormal."""
    exponents = raw[:, :1].int()
    bits = torch.where(exponents < 2, 0x00200000 << exponents, (exponents - 1) << 23)
    codes = _looked_up(E2M1, nibbles(raw[:, 1:]))
    return Groups(codes[:, None], bits.int().view(torch.float32))


def nvfp4(raw: torch.Tensor) -> Groups:
    """Four groups of 16, whose scales are e4m3 without a sign."""
    magnitudes = raw[:, :4] & 0x7F
    plain = torch.where(magnitudes == NOT_A_NUMBER, 0, magnitudes)
    scales = plain.view(torch.float8_e4m3fn).float() / 2
    # ggml looks at the sign for the number that is none, and nowhere else.
    scales[raw[:, :4] == 0x80 | NOT_A_NUMBER] = 240
    return Groups(_looked_up(E2M1, nibbles(raw[:, 4:].unflatten(1, (4, 8)))), scales)


def _looked_up(table: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
    return torch.tensor(table, dtype=torch.int8)[codes.int()]
