"""Whole numbers packed into words of 32 bits, and the numbers that codes in groups stand for."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.ops.quantize import GROUP, Codes, CodesForm

ROWS = 256  # of a matrix, for which scales are spread over the inputs at once


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, words] int32 -> [n, words * 32 / bits] uint8 codes of 4 or 8 bits, the lowest first."""
    raw = words.contiguous().view(torch.uint8)  # the lowest byte of a word first
    if bits == 8:
        return raw
    return torch.stack((raw & 15, raw >> 4), -1).flatten(1)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the words that `unpack` takes apart. Zeros fill the last word of a row."""
    missing = -codes.shape[1] % (32 // bits)
    padded = torch.cat((codes, codes.new_zeros(len(codes), missing)), 1)
    if bits == 4:
        padded = padded[:, 0::2] | padded[:, 1::2] << 4
    return padded.contiguous().view(torch.int32)


@dataclass(frozen=True, slots=True)
class Grouped:
    """The matrix (code - zero) * scale, with codes [outputs, inputs].

    Scales and zeros are [outputs, groups]. Group g has the g-th of equal runs of inputs, or those
    inputs whose `group_of` [inputs] is g. Without `group_of`, scales and zeros may be [1, groups]
    for all outputs.
    """

    codes: torch.Tensor  # uint8, int8 or e4m3
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    group_of: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        """Return the matrix in fp32, rounded once."""
        values = self.codes.float()
        scales = self.scales.float().contiguous()  # few: converted once, not at every use
        zeros = None if self.zeros is None else self.zeros.float().contiguous()
        if self.group_of is None:
            grouped = values.unflatten(1, (scales.shape[1], -1))  # a view
            if zeros is not None:
                grouped -= zeros[..., None]
            grouped *= scales[..., None]
            return values
        for begin in range(0, len(values), ROWS):
            rows = slice(begin, begin + ROWS)
            if zeros is not None:
                values[rows] -= zeros[rows, self.group_of]
            values[rows] *= scales[rows, self.group_of]
        return values

    def regrouped(self, form: CodesForm) -> Codes:
        """Return the codes with scales for 32 inputs, rounded to fp16. See `form_of`."""
        scales = self._by_32(self.scales.float())
        codes, offsets = self.codes, None
        if codes.dtype == torch.int8:
            codes = codes.view(torch.uint8) + (1 << form.bits - 1)  # wraps around
        if form.has_offsets:
            assert self.zeros is not None
            zeros = self._by_32(self.zeros.float())
            if self.codes.dtype == torch.int8:
                zeros = zeros + (1 << form.bits - 1)
            offsets = (-zeros * scales).half()
        return Codes(codes, scales.half(), offsets, form.bits)

    def _by_32(self, by_group: torch.Tensor) -> torch.Tensor:
        outputs, inputs = self.codes.shape
        repeated = by_group.repeat_interleave(inputs // by_group.shape[1] // GROUP, 1)
        return repeated.expand(outputs, -1).contiguous()


def form_of(bits: int, inputs: int, groups: int, *, has_zeros: bool) -> CodesForm | None:
    """Return the form of `Grouped.regrouped` for groups in order; None if they are not of 32s."""
    if inputs % groups or inputs // groups % GROUP:
        return None
    return CodesForm(bits, has_zeros)


def in_blocks(codes: torch.Tensor, scales: torch.Tensor, height: int, width: int) -> Grouped:
    """Return the matrix code * scale, with a scale for height x width codes.

    Scales are [outputs / height, inputs / width], rounded up: the last blocks may be cut off.
    """
    outputs, inputs = codes.shape
    by_row = scales.repeat_interleave(height, 0)[:outputs]
    group_of = None
    if inputs % width:
        group_of = torch.arange(inputs) // width
    return Grouped(codes, by_row, group_of=group_of)
