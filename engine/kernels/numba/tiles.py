"""The check of the kernel that multiplies in tiles (AMX), which a CPU without AMX cannot run.

Intel publishes two orders for the sums in a tile: that of its manual, and that of its guide to the
C functions. So values must be close to the exact ones, as close as either order gets. The bits of a
row must be equal for all numbers of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cache

import torch

COUNTS = (1, 15, 16, 17, 32, 33)  # rows that are multiplied again: whole tiles, and parts
MOST_ROWS = 70
SAMPLE = 64  # first and last outputs whose values are checked
TILE_INPUTS = 32

Multiply = Callable[[torch.Tensor], torch.Tensor]


def sums_agree(multiply: Multiply, weight: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Return whether `multiply` computes x W^T + b for a weight [out, in], in bf16 or fp32.

    Its products may have more columns than the weight has outputs.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(MOST_ROWS, weight.shape[1], generator=generator).bfloat16()
    found = multiply(x)
    parts = [(x[:count], found[:count]) for count in COUNTS]
    parts += [(x[row : row + 1], found[row : row + 1]) for row in (1, 31, 40, MOST_ROWS - 1)]
    same_bits = all(torch.equal(multiply(rows), expected) for rows, expected in parts)
    ends = (slice(SAMPLE), slice(max(len(weight) - SAMPLE, 0), len(weight)))
    biases = (None if bias is None else bias[end] for end in ends)
    columns = zip(ends, biases, strict=True)
    return same_bits and all(_close(x, weight[end], own, found[:, end]) for end, own in columns)


def _close(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, found: torch.Tensor
) -> bool:
    """Return whether the products [rows, out] differ from the exact ones by rounding only."""
    added = torch.zeros(len(weight)).double() if bias is None else bias.double()
    rows, columns = x.double(), weight.double().t()
    exact = rows @ columns + added
    magnitude = rows.abs() @ columns.abs() + added.abs()
    additions = TILE_INPUTS + weight.shape[1] / TILE_INPUTS
    error = additions * 2**-24 * magnitude + 2**-100  # numbers near 2**-126 may become zeros
    if found.dtype == torch.bfloat16:
        error += 2**-8 * exact.abs()
    return bool(((found.double() - exact).abs() <= error).all())


class TileChecks:
    """The results of the check, by the form of a layer. Each form is checked once."""

    def __init__(self) -> None:
        self._passed: dict[Hashable, bool] = {}

    def passes(self, form: Hashable, check: Callable[[], bool]) -> bool:
        if form not in self._passed:
            self._passed[form] = check()
        return self._passed[form]

    @property
    def failed(self) -> int:
        """The number of forms that failed."""
        return sum(not passed for passed in self._passed.values())


@cache
def tile_checks() -> TileChecks:
    """Return the checks of this process."""
    return TileChecks()
