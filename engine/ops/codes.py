"""Weights that are rounded to whole numbers, with a scale for every 32 inputs of an output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from engine.kernels.numba.call import GROUP

Quantization = Literal["int8", "int4"]
BITS: dict[Quantization, int] = {"int8": 8, "int4": 4}
SCALES: dict[Quantization, int] = {"int8": 1, "int4": 2}  # fp16 numbers of a group


class CodesForm(NamedTuple):
    """How codes are kept: the bits of one, and whether groups have offsets."""

    bits: int
    has_offsets: bool

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight [outputs, inputs] with its scales and offsets."""
        groups = inputs // GROUP
        return outputs * (inputs * self.bits // 8 + (4 if self.has_offsets else 2) * groups)


def common_form(forms: Sequence[CodesForm]) -> CodesForm:
    """Return the smallest form that keeps codes of all these forms without loss."""
    return CodesForm(max(form.bits for form in forms), any(form.has_offsets for form in forms))


@dataclass(frozen=True, slots=True)
class Codes:
    """A weight [out, in]: codes uint8 [out, in], scales and offsets fp16 [out, in / GROUP].

    It is code * scale + offset; without offsets (code - zero) * scale, and zero is the middle code.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None
    bits: int

    @property
    def form(self) -> CodesForm:
        return CodesForm(self.bits, self.offsets is not None)

    def kept_in(self, form: CodesForm) -> Codes:
        """Return the same weight in a form with as many bits, and offsets if it has some."""
        codes, offsets = self.codes, self.offsets
        if offsets is None and form.has_offsets:
            offsets = self.scales * -(1 << self.bits - 1)
        elif offsets is None:
            codes = codes + ((1 << form.bits - 1) - (1 << self.bits - 1))
        return Codes(codes, self.scales, offsets, form.bits)

    def numbers(self) -> torch.Tensor:
        """Return the weight that the codes stand for, in fp32."""
        groups = self.codes.float().unflatten(1, (-1, GROUP))
        scales = self.scales.float()[..., None]
        if self.offsets is None:
            return ((groups - (1 << self.bits - 1)) * scales).flatten(1)
        return (groups * scales + self.offsets.float()[..., None]).flatten(1)


def stacked(parts: Sequence[Codes]) -> Codes:
    """Stack the outputs of several weights with the same inputs, without loss."""
    form = common_form([part.form for part in parts])
    kept = [part.kept_in(form) for part in parts]
    offsets = [part.offsets for part in kept if part.offsets is not None]
    return Codes(
        torch.cat([part.codes for part in kept]),
        torch.cat([part.scales for part in kept]),
        torch.cat(offsets) if offsets else None,
        form.bits,
    )


def quantise(weight: torch.Tensor, kind: Quantization) -> Codes:
    """Round a weight [out, in], whose inputs fill whole groups.

    `int8` divides the range from -largest to largest into 254 steps, as Q8_0 of GGUF; `int4` that
    from smallest to largest into 15 steps, as Q4_1.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    return _int8(groups) if kind == "int8" else _int4(groups)


def _int8(groups: torch.Tensor) -> Codes:
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half()
    codes = (groups / _step(scales)).round().clamp(-128, 127) + 128
    return Codes(codes.to(torch.uint8).flatten(1), scales.squeeze(-1), None, 8)


def _int4(groups: torch.Tensor) -> Codes:
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales, offsets = ((high - low) / 15).half(), low.half()
    codes = ((groups - offsets.float()) / _step(scales)).round().clamp(0, 15)
    return Codes(codes.to(torch.uint8).flatten(1), scales.squeeze(-1), offsets.squeeze(-1), 4)


def _step(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales as divisors: of zeros, any will do."""
    return torch.where(scales == 0, 1.0, scales.float())
