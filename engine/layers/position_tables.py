"""Tables with a row for each position, which are computed and not read from a checkpoint.

A context of a million positions needs gigabytes and seconds for them. So a model on the meta
device, as it is planned, has only their shapes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn


class PositionTables(nn.Module):
    """A layer with such tables. They are computed at once, or by `fill` after planning."""

    def __init__(self, shapes: Mapping[str, Sequence[int]], dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_buffer(name, torch.empty(*shape, dtype=dtype), persistent=False)

    @property
    def is_planned(self) -> bool:
        """Whether the tables have only shapes."""
        return any(table.is_meta for table in self.buffers(recurse=False))

    def fill(self) -> None:
        """Compute the tables, on the CPU."""
        raise NotImplementedError


def fill_tables(model: nn.Module) -> None:
    """Compute the tables of a model that was planned, on the CPU."""
    for layer in model.modules():
        if isinstance(layer, PositionTables) and layer.is_planned:
            layer.fill()
