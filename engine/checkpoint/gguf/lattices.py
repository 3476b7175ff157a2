"""The encodings IQ1_S to IQ3_S: 4 or 8 numbers together are a point of a grid (`grids.py`)."""

from __future__ import annotations

import torch

from engine.checkpoint.gguf.grids import points
from engine.checkpoint.gguf.groups import Groups, bits, half, halves_of_bytes

EIGHTH = 8  # of a step: what all numbers of IQ1_S and IQ1_M are moved by
FIELDS_OF_7 = torch.arange(0, 28, 7)
FIELDS_OF_3 = torch.arange(0, 12, 3)


def iq2_xxs(raw: torch.Tensor) -> Groups:
    """For 32 numbers: four indices, and a word of four sets of signs and the scale."""
    words = raw[:, 2:].contiguous().view(-1, 8, 8)
    scales, signs = _signs_and_scales(words[..., 4:])
    codes = points("IQ2_XXS")[words[..., :4].int()].view(-1, 8, 32) * signs
    return Groups(codes, half(raw[:, :2]) * (0.5 + scales) * 0.25)


def iq2_xs(raw: torch.Tensor) -> Groups:
    """Groups of 16. A word of 16 bits has an index, and the signs of its point."""
    words = _words(raw[:, 2:66])
    codes = points("IQ2_XS")[words & 511] * _signs(_with_parity(words >> 9))
    scales = halves_of_bytes(raw[:, 66:]).float()
    return Groups(codes.view(-1, 16, 16), half(raw[:, :2]) * (0.5 + scales) * 0.25)


def iq2_s(raw: torch.Tensor) -> Groups:
    """Groups of 16. Of each index, two bits are in another byte."""
    high = raw[:, 66:74, None] >> torch.arange(0, 8, 2, dtype=torch.uint8) & 3
    indices = raw[:, 2:34].int() | high.flatten(1).int() << 8
    codes = points("IQ2_S")[indices] * _signs(raw[:, 34:66])
    scales = halves_of_bytes(raw[:, 74:]).float()
    return Groups(codes.view(-1, 16, 16), half(raw[:, :2]) * (0.5 + scales) * 0.25)


def iq3_xxs(raw: torch.Tensor) -> Groups:
    """Points of 4 numbers. For 32 numbers, a word has four sets of 8 signs and the scale."""
    scales, signs = _signs_and_scales(raw[:, 66:].contiguous().view(-1, 8, 4))
    codes = points("IQ3_XXS")[raw[:, 2:66].int()].view(-1, 8, 32) * signs
    return Groups(codes, half(raw[:, :2]) * (0.5 + scales) * 0.5)


def iq3_s(raw: torch.Tensor) -> Groups:
    """Points of 4 numbers. Of each index, one bit is in another byte."""
    indices = raw[:, 2:66].int() | bits(raw[:, 66:74]).int() << 8
    signs = _signs(raw[:, 74:106]).view(-1, 8, 32)
    codes = points("IQ3_S")[indices].view(-1, 8, 32) * signs
    scales = halves_of_bytes(raw[:, 106:]).float()
    return Groups(codes, half(raw[:, :2]) * (1 + 2 * scales))


def iq1_s(raw: torch.Tensor) -> Groups:
    """For 32 numbers, a word has three more bits of four indices, the scale and a direction."""
    words = _words(raw[:, 34:])
    high = words[..., None] >> FIELDS_OF_3 & 7
    indices = raw[:, 2:34].int() | high.flatten(1) << 8
    codes = points("IQ1_S")[indices].view(-1, 8, 32) * EIGHTH
    codes += _directions(words >> 15)[..., None]
    scales = 2 * (words >> 12 & 7).float() + 1
    return Groups(codes, half(raw[:, :2]) * scales / EIGHTH)


def iq1_m(raw: torch.Tensor) -> Groups:
    """Groups of 16. Four words have the scales, and on top a part each of the block's scale."""
    words = _words(raw[:, 48:])
    parts = (words & 0xF000) >> torch.tensor((12, 8, 4, 0))
    whole = parts.sum(1, keepdim=True).to(torch.int16).view(torch.float16).float()
    scales = 2 * (words[..., None] >> FIELDS_OF_3 & 7).flatten(1).float() + 1
    more = halves_of_bytes(raw[:, 32:48]).int()
    indices = raw[:, :32].int() | (more & 7) << 8
    codes = points("IQ1_S")[indices] * EIGHTH + _directions(more >> 3)[..., None]
    return Groups(codes.view(-1, 16, 16), whole * scales / EIGHTH)


def _words(raw: torch.Tensor) -> torch.Tensor:
    """Read numbers of 16 bits: [n, 2 * count] bytes -> [n, count] int32."""
    return raw.contiguous().view(torch.int16).int() & 0xFFFF


def _directions(down: torch.Tensor) -> torch.Tensor:
    """Return -1 for 1 and 1 for 0."""
    return (1 - 2 * down).to(torch.int8)


def _signs(raw: torch.Tensor) -> torch.Tensor:
    """Bytes [..., count] -> [..., count, 8] of 1, or -1 where a bit is set, the lowest first."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return _directions((raw[..., None] >> shifts & 1).to(torch.int8))


def _with_parity(seven: torch.Tensor) -> torch.Tensor:
    """Give sets of 7 signs the 8th, so that an even number of bits is set."""
    folded = seven ^ seven >> 4
    folded = folded ^ folded >> 2
    parity = (folded ^ folded >> 1) & 1
    return (seven | parity << 7).to(torch.uint8)


def _signs_and_scales(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Words of 4 bytes [n, groups, 4] -> scales fp32 [n, groups], signs int8 [n, groups, 32]."""
    words = raw.contiguous().view(torch.int32)
    signs = _signs(_with_parity(words >> FIELDS_OF_7 & 127)).flatten(2)
    return (words >> 28 & 15).squeeze(-1).float(), signs
