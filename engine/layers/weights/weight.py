"""The interface that all forms of a layer's weight have."""

from __future__ import annotations

from typing import Protocol

import torch


class Weight(Protocol):
    """A weight [out, in] with its bias, in a form of its own."""

    @property
    def nbytes(self) -> int: ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
