"""Weights that are rounded to whole numbers with scales.

A weight is (code - zero) * scale. Codes are unsigned; `zero` is the middle one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from engine.kernels.numba.call import GROUP

Quantization = Literal["int8", "int4"]
BITS: dict[Quantization, int] = {"int8": 8, "int4": 4}
# Factors of the scale that rounds a group's largest weight exactly: a smaller scale rounds the
# largest weight worse and the others better.
CANDIDATES = torch.linspace(0.80, 1.0, 11)


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [out, in]: codes uint8 [out, in], and scales [out, groups].

    A scale in fp32 belongs to an output, and one in fp16 to GROUP inputs of an output.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    bits: int

    @property
    def zero(self) -> int:
        return 1 << self.bits - 1

    def numbers(self) -> torch.Tensor:
        """Return the weight that the codes stand for, in fp32."""
        groups = self.scales.shape[1]
        by_group = (self.codes.float() - self.zero).unflatten(1, (groups, -1))
        return (by_group * self.scales.float()[..., None]).flatten(1)


def quantise(weight: torch.Tensor, kind: Quantization) -> Codes:
    """Round a weight [out, in]: `int8` with a scale per output, `int4` with one per 32 inputs."""
    return _int8(weight.float()) if kind == "int8" else _int4(weight.float())


def _int8(weight: torch.Tensor) -> Codes:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales.clamp(min=1e-30)).round() + 128
    return Codes(codes.to(torch.uint8), scales, 8)


def _int4(weight: torch.Tensor) -> Codes:
    """Try scales for each group, and keep the one with the smallest squared error.

    The largest weight gets code 0, which is -8; if it is positive, its scale is negative. So the
    wider half of the codes is on its side.
    """
    groups = weight.unflatten(1, (-1, GROUP))
    at = groups.abs().argmax(-1, keepdim=True)
    largest = groups.gather(-1, at)
    best = torch.full_like(largest, torch.inf)
    codes = torch.empty_like(groups, dtype=torch.uint8)
    scales = torch.empty_like(largest, dtype=torch.float16)
    for factor in CANDIDATES:
        scale = (largest / -8 * factor).half()
        step = torch.where(scale == 0, 1.0, scale.float())
        rounded = (groups / step).round().clamp(-8, 7)
        error = (rounded * step - groups).square().sum(-1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        codes = torch.where(better, (rounded + 8).to(torch.uint8), codes)
        scales = torch.where(better, scale, scales)
    return Codes(codes.flatten(1), scales.squeeze(-1), 4)
