"""The interface of all packed forms of a layer's weight: one class in one file."""

from __future__ import annotations

from typing import Protocol

import torch


class PackedForm(Protocol):
    """A weight [out, in] with its bias, in the layout that a kernel reads.

    The bits of a row of products must not depend on the other rows.
    """

    @property
    def nbytes(self) -> int:
        """All bytes that it takes, with scales and padding. `nbytes_of` plans the same number."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out] in the dtype of x, or fp32 for logits."""


class RowsForm(PackedForm, Protocol):
    """A form that gives back the rows that were packed, so that a tied embedding needs no copy."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Ids [T] -> rows [T, in] of the weight, bit by bit; of codes, the numbers in bf16."""
