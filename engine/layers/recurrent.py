"""Recurrent layers: they keep a state of fixed size in place of keys and values."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from engine.checkpoint.parameters import LoadedLayer, stacked_slices
from engine.device.ranks import Ranks, Shard
from engine.ops.causal_conv import causal_conv
from engine.ops.kernels import Kernels
from engine.ops.state_runs import StateRuns


class CausalConv(LoadedLayer):
    """A depthwise convolution over the last `width` inputs of each sequence.

    `parts` are the channels that belong together, such as those of queries, keys and values, and
    `units` the number of equal units of each that ranks divide. They are one checkpoint tensor.
    """

    def __init__(
        self,
        parts: Mapping[str, int],
        width: int,
        *,
        units: Mapping[str, int],
        bias: bool = False,
        silu: bool = False,
    ) -> None:
        super().__init__()
        channels = sum(parts.values())
        self.units, self.silu = units, silu
        self.weight = nn.Parameter(torch.empty(channels, 1, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.tensors.slices = stacked_slices(parts)
        self.kernels: Kernels = "torch"

    def divide(self, ranks: Ranks) -> None:
        """Keep this rank's channels. Raises ConfigError if the units cannot be divided."""
        slices = self.tensors.slices
        sizes = {part: each.stop - each.start for part, each in slices.items()}
        rows = {part: ranks.units(size, self.units[part]) for part, size in sizes.items()}
        self.tensors.take_shard(Shard((len(self.weight), 1), slices, rows, slice(0, 1)))

    def forward(self, x: torch.Tensor, tails: torch.Tensor, runs: StateRuns) -> torch.Tensor:
        """x [T, channels], tails [slots + 1, width - 1, channels] -> [T, channels]."""
        weight, kernels = self.weight.squeeze(1), self.kernels
        return causal_conv(x, weight, self.bias, tails, runs, silu=self.silu, kernels=kernels)
