"""Whole numbers packed into words of 32 bits, and the numbers that codes in groups stand for."""

from __future__ import annotations

import torch

ROWS = 256  # of a matrix, for which scales are spread over the inputs at once


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, words] int32 -> [n, words * 32 / bits] uint8 codes of 4 or 8 bits, the lowest first."""
    raw = words.contiguous().view(torch.uint8)  # the lowest byte of a word first
    if bits == 8:
        return raw
    return torch.stack((raw & 15, raw >> 4), -1).flatten(1)


def dequantise(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None = None,
    group_of: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return (code - zero) * scale [outputs, inputs] in fp32, rounded once.

    Codes are [outputs, inputs]; scales and zeros [outputs, groups]. Group g has the g-th of equal
    runs of inputs, or those inputs whose `group_of` [inputs] is g. Without `group_of`, scales and
    zeros may be [1, groups] for all outputs.
    """
    numbers = codes.float()
    scales = scales.float().contiguous()  # few: converted once, not at every use
    zeros = None if zeros is None else zeros.float().contiguous()
    if group_of is None:
        grouped = numbers.unflatten(1, (scales.shape[1], -1))  # a view
        if zeros is not None:
            grouped -= zeros[..., None]
        grouped *= scales[..., None]
    else:
        for begin in range(0, len(numbers), ROWS):
            rows = slice(begin, begin + ROWS)
            if zeros is not None:
                numbers[rows] -= zeros[rows, group_of]
            numbers[rows] *= scales[rows, group_of]
    return numbers


def dequantise_blocks(
    codes: torch.Tensor, scales: torch.Tensor, height: int, width: int
) -> torch.Tensor:
    """Return code * scale [outputs, inputs] in fp32, with a scale for height x width codes.

    Scales are [outputs / height, inputs / width], rounded up: the last blocks may be cut off.
    """
    outputs, inputs = codes.shape
    by_row = scales.repeat_interleave(height, 0)[:outputs]
    group_of = None
    if inputs % width:
        group_of = torch.arange(inputs) // width
    return dequantise(codes, by_row, group_of=group_of)
