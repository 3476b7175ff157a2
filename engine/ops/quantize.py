"""Weights that are rounded to codes, with a scale for every group of inputs of an output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from engine.ops.codes import GROUPS, Quantization

BITS: dict[Quantization, int] = {"int8": 8, "int4": 4, "fp8": 8}
SCALE_BYTES: dict[Quantization, int] = {"int8": 2, "int4": 4, "fp8": 4}  # of a group, with offset
GROUP = GROUPS["int8"]  # also of int4
FLOAT_GROUP = GROUPS["fp8"]
FLOAT8 = torch.float8_e4m3fn


class CodesForm(NamedTuple):
    """How codes are kept: the bits of one, and whether groups have offsets.

    If `is_exact`, they stand for the same numbers as those of the checkpoint.
    """

    bits: int
    has_offsets: bool
    is_exact: bool = False

    def nbytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a weight [outputs, inputs] with its scales and offsets."""
        groups = inputs // GROUP
        return outputs * (inputs * self.bits // 8 + (4 if self.has_offsets else 2) * groups)


def common_form(forms: Sequence[CodesForm]) -> CodesForm:
    """Return the smallest form that keeps codes of all these forms without loss."""
    return CodesForm(
        max(form.bits for form in forms),
        any(form.has_offsets for form in forms),
        all(form.is_exact for form in forms),
    )


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

    def of_outputs(self, outputs: torch.Tensor | slice) -> Codes:
        """Return the codes of some outputs, by their numbers."""
        offsets = None if self.offsets is None else self.offsets[outputs]
        return Codes(self.codes[outputs], self.scales[outputs], offsets, self.bits)

    def of_inputs(self, inputs: slice) -> Codes:
        """Return the codes of some inputs, which are whole groups."""
        groups = slice(inputs.start // GROUP, inputs.stop // GROUP)
        offsets = None if self.offsets is None else self.offsets[:, groups]
        return Codes(self.codes[:, inputs], self.scales[:, groups], offsets, self.bits)

    def in_form(self, form: CodesForm) -> Codes:
        """Return the same weight in a form with as many bits, and offsets if it has some."""
        codes = self.codes
        offsets = self.offsets
        zero = middle(self.bits)
        if offsets is None and form.has_offsets:
            offsets = self.scales * -zero
        elif offsets is None:
            codes = codes + (middle(form.bits) - zero)
        return Codes(codes, self.scales, offsets, form.bits)

    def dequantize(self) -> torch.Tensor:
        """Return the weight that the codes stand for, in fp32."""
        groups = self.codes.float().unflatten(1, (-1, GROUP))
        scales = self.scales.float()[..., None]
        if self.offsets is None:
            values = (groups - middle(self.bits)) * scales
        else:
            offsets = self.offsets.float()[..., None]
            values = groups * scales + offsets
        return values.flatten(1)


def middle(bits: int) -> int:
    """Return the code that stands for 0 without offsets."""
    return 1 << bits - 1


def stacked(parts: Sequence[Codes]) -> Codes:
    """Stack the outputs of several weights with the same inputs, without loss."""
    if len(parts) == 1:
        return parts[0]
    form = common_form([part.form for part in parts])
    same = [part.in_form(form) for part in parts]
    offsets = [part.offsets for part in same if part.offsets is not None]
    return Codes(
        torch.cat([part.codes for part in same]),
        torch.cat([part.scales for part in same]),
        torch.cat(offsets) if offsets else None,
        form.bits,
    )


@dataclass(frozen=True, slots=True)
class Float8Codes:
    """A weight [out, in]: codes e4m3 [out, in], scales fp32 [out, groups]. It is code * scale.

    A group has FLOAT_GROUP inputs, the last one of an output may have fewer.
    """

    codes: torch.Tensor
    scales: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Return the weight that the codes stand for, in fp32."""
        scales = self.scales.repeat_interleave(FLOAT_GROUP, 1)
        return self.codes.float() * scales[:, : self.codes.shape[1]]


class ZeroedCodes(NamedTuple):
    """A weight [out, in] in whole numbers of 4 bits: (code - zero) * scale."""

    codes: torch.Tensor  # uint8 [out, in], from 0 to 15
    scales: torch.Tensor  # fp16 [out, in / GROUP]
    zeros: torch.Tensor  # uint8, like scales


def is_quantized(inputs: int, kind: Quantization) -> bool:
    """Return whether a weight [out, inputs] is quantised: whole numbers need whole groups."""
    return kind == "fp8" or inputs % GROUP == 0


def quantize(weight: torch.Tensor, kind: Quantization) -> Codes | Float8Codes:
    """Round a weight [out, in] for which `is_quantized`.

    `int8` divides the range from -largest to largest into 254 steps, as Q8_0 of GGUF; `int4` that
    from smallest to largest into 15 steps, as Q4_1. `fp8` scales a group so that its largest number
    is the largest one of e4m3.
    """
    if kind == "fp8":
        return _float8(weight.float())
    groups = weight.float().unflatten(1, (-1, GROUP))
    return _int8(groups) if kind == "int8" else _int4(groups)


def _int8(groups: torch.Tensor) -> Codes:
    largest = groups.abs().amax(-1, keepdim=True)
    scales = _divided(largest, 127).half()
    steps = groups / _step(scales)
    codes = steps.round().clamp(-128, 127) + 128
    whole = codes.to(torch.uint8).flatten(1)
    return Codes(whole, scales.squeeze(-1), None, bits=8)


def _int4(groups: torch.Tensor) -> Codes:
    low = groups.amin(-1, keepdim=True)
    high = groups.amax(-1, keepdim=True)
    scales = _divided(high - low, 15).half()
    offsets = low.half()
    above = groups - offsets.float()
    steps = above / _step(scales)
    codes = steps.round().clamp(0, 15)
    whole = codes.to(torch.uint8).flatten(1)
    return Codes(whole, scales.squeeze(-1), offsets.squeeze(-1), bits=4)


def _float8(weight: torch.Tensor) -> Float8Codes:
    outputs, inputs = weight.shape
    missing = -inputs % FLOAT_GROUP
    padded = torch.cat((weight, weight.new_zeros(outputs, missing)), 1)
    codes, scales = float8(padded.unflatten(1, (-1, FLOAT_GROUP)))
    return Float8Codes(codes.flatten(1)[:, :inputs].contiguous(), scales.squeeze(-1))


def float8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round groups [..., n] of fp32 numbers to e4m3, with scales [..., 1] fp32."""
    largest = torch.finfo(FLOAT8).max
    magnitudes = groups.abs().amax(-1, keepdim=True)
    scales = _divided(magnitudes, largest)
    # The quotient of the largest number may lie above `largest` by an fp32 rounding.
    steps = groups / _step(scales)
    codes = steps.clamp(-largest, largest).to(FLOAT8)
    return codes, scales


def int4_with_zeros(weight: torch.Tensor) -> ZeroedCodes:
    """Round a weight [out, in] for which `is_quantized` to whole numbers with a whole zero.

    The range from smallest to largest number, which is made to include 0, has 15 steps. A scale has
    7 significant bits: bfloat16 holds it, and fp16 its product with every zero.
    """
    groups = weight.float().unflatten(1, (-1, GROUP))
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    exact = _divided(high - low, 15)
    scales = _seven_bits(exact).half()
    step = _step(scales)
    zeros = (-low / step).round().clamp(0, 15)
    steps = (groups / step).round()
    codes = (steps + zeros).clamp(0, 15)
    whole = codes.to(torch.uint8).flatten(1)
    whole_zeros = zeros.squeeze(-1).to(torch.uint8)
    return ZeroedCodes(whole, scales.squeeze(-1), whole_zeros)


def _seven_bits(values: torch.Tensor) -> torch.Tensor:
    """Round to 7 significant bits."""
    fractions, exponents = torch.frexp(values)  # fractions are 0, or at least 1/2
    return torch.ldexp((fractions * 128).round() / 128, exponents)


def _divided(values: torch.Tensor, by: float) -> torch.Tensor:
    """Divide, on a GPU too: torch would multiply by the rounded reciprocal of a Python number."""
    return values / torch.full_like(values, by)


def _step(scales: torch.Tensor) -> torch.Tensor:
    """Return the scales as divisors: of zeros, any will do."""
    return torch.where(scales == 0, 1.0, scales.float())
