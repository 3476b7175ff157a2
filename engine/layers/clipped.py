"""Linear layers whose inputs and outputs are clipped to learned ranges, as in Gemma 4's tower."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from engine.checkpoint.parameters import LayerParameters, LoadedLayer
from engine.layers.linear import Linear

if TYPE_CHECKING:
    from engine.checkpoint.source import Source
    from engine.checkpoint.weight_map import Target


class LimitParameters(LayerParameters):
    """Parameters of shape [], which may be infinite."""

    def load(self, name: str, target: Target, source: Source) -> None:
        self.check_shape(name, target, source, source.shape(target))
        self._parameters[name] = nn.Parameter(source.limit(), requires_grad=False)

    def expected_shape(self, name: str, target: Target) -> tuple[int, ...]:
        return ()


class Limits(LoadedLayer):
    """The ranges of a layer's inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.input_min = nn.Parameter(torch.empty(()))
        self.input_max = nn.Parameter(torch.empty(()))
        self.output_min = nn.Parameter(torch.empty(()))
        self.output_max = nn.Parameter(torch.empty(()))
        self.tensors = LimitParameters(self._parameters)


class ClippableLinear(nn.Module):
    """y = x W^T, with x and y in a range each if it `is_clipped`."""

    def __init__(
        self, in_features: int, out_features: int, *, linear: type[Linear], is_clipped: bool
    ) -> None:
        super().__init__()
        self.linear = linear(in_features, out_features)
        self.limits = Limits() if is_clipped else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] -> [T, out]."""
        limits = self.limits
        if limits is None:
            return self.linear(x)
        product: torch.Tensor = self.linear(x.clamp(limits.input_min, limits.input_max))
        return product.clamp_(limits.output_min, limits.output_max)
