"""A plain model of TDPBF16PS, AMX's product of bf16 tiles, and of a linear layer made of it.

It follows the operation in Intel's Software Developer's Manual. Per output, the products of the
even inputs are added to a sum that starts at zero, those of the odd inputs to another, with one
rounding each (FMA). Both sums are added, and the result is added to the output. Numbers below
fp32's normal range count as zeros, as inputs and as results. Intel's guide to the C functions
shows another order (`in_guide_order`): the output itself is the sum, and takes even and odd inputs
in turn.
"""

from __future__ import annotations

import numpy as np
import torch

TILE_INPUTS = 32
LEAST = 2.0**-126  # fp32's smallest normal number


def tdpbf16ps(sums: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return sums [rows, outputs] plus a [rows, 32] times b [32, outputs]; fp32 with bf16 values.

    The inputs 2k and 2k+1 are a pair.
    """
    a, b = flushed(a), flushed(b)
    even = odd = np.zeros_like(sums)
    for k in range(0, TILE_INPUTS, 2):
        even = fma(a[:, k, None], b[k], even)
        odd = fma(a[:, k + 1, None], b[k + 1], odd)
    return added(sums, added(even, odd))


def in_guide_order(sums: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the same with the other order that Intel publishes."""
    a, b = flushed(a), flushed(b)
    for k in range(TILE_INPUTS):
        sums = fma(a[:, k, None], b[k], sums)
    return sums


def linear_in_tiles(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, multiply=tdpbf16ps
) -> torch.Tensor:
    """Return x W^T + b in fp32, for x [rows, in] and a weight [out, in] in bf16.

    Zeros fill the last tile of inputs.
    """
    missing = -x.shape[1] % TILE_INPUTS
    rows = torch.nn.functional.pad(x.float(), (0, missing)).numpy()
    columns = torch.nn.functional.pad(weight.float(), (0, missing)).t().numpy()
    sums = np.zeros((len(x), len(weight)), np.float32)
    for first in range(0, len(columns), TILE_INPUTS):
        part = slice(first, first + TILE_INPUTS)
        sums = multiply(sums, rows[:, part], columns[part])
    products = torch.from_numpy(sums)
    return products if bias is None else products + bias.float()


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c, rounded once. float64 holds a product of bf16 numbers.

    The sum in float64 is rounded, too. Only if one number is 2**29 times the other does that lose
    bits, and the larger one, which has at most 24 bits, is then the result.
    """
    return flushed((a.astype(np.float64) * b + c).astype(np.float32))


def added(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return flushed(a + b)


def flushed(numbers: np.ndarray) -> np.ndarray:
    """Return fp32 numbers with zeros of the same sign for those below the normal range."""
    return np.where(np.abs(numbers) < LEAST, np.copysign(np.float32(0), numbers), numbers)
