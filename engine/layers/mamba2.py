"""Mamba-2 (arXiv 2405.21060): a selective state space in place of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.checkpoint.parameters import LoadedLayer
from engine.device.ranks import Ranks, Shard
from engine.layers.linear import Linear
from engine.layers.norm import GroupedRMSNorm
from engine.layers.recurrent import CausalConv
from engine.layers.state import LayerState, StatePart
from engine.ops.kernels import Kernels
from engine.ops.selective_scan import selective_scan


@dataclass(frozen=True, slots=True)
class Mamba2Shape:
    """Sizes of a Mamba-2 layer. A group of heads shares the vectors b and c of a token."""

    heads: int
    head_dim: int
    groups: int
    state: int  # numbers that a head keeps of each of its dimensions
    conv_width: int
    norm_eps: float
    bias: bool = False  # of the projections
    conv_bias: bool = True

    @property
    def inner(self) -> int:
        """The width of all heads."""
        return self.heads * self.head_dim

    @property
    def channels(self) -> dict[str, int]:
        """The channels of the convolution, by their part."""
        vectors = self.groups * self.state
        return {"x": self.inner, "b": vectors, "c": vectors}

    @property
    def units(self) -> dict[str, int]:
        """How many equal units ranks divide each part into."""
        return {"x": self.heads, "b": self.groups, "c": self.groups}


class Mamba2(LoadedLayer):
    """out(norm(y, z)), with y = scan(silu(conv(x, b, c)), dt) and [z, x, b, c, dt] = inputs(x).

    It is number `index` of the recurrent layers. Ranks divide the heads and the groups.
    """

    def __init__(self, hidden: int, shape: Mamba2Shape, index: int) -> None:
        super().__init__()
        heads, channels, units = shape.heads, shape.channels, shape.units
        self.shape = shape
        self.inputs = Linear(
            hidden,
            {"z": shape.inner, **channels, "dt": heads},
            bias=shape.bias,
            output_units={"z": heads, **units, "dt": heads},
        )
        self.conv = CausalConv(
            channels, shape.conv_width, units=units, bias=shape.conv_bias, silu=True
        )
        tails = (shape.conv_width - 1, sum(channels.values()))
        divided = tuple(zip(channels.values(), units.values(), strict=True))
        self.state = LayerState(
            index,
            StatePart(tails, parts=divided, dim=1),
            StatePart((heads, shape.state, shape.head_dim), torch.float32),
        )
        # Named as in checkpoints.
        self.A_log = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = GroupedRMSNorm(shape.inner, shape.norm_eps, groups=shape.groups, units=heads)
        self.out = Linear(shape.inner, hidden, bias=shape.bias, input_units=heads)
        self.kernels: Kernels = "torch"

    def divide(self, ranks: Ranks) -> None:
        """Keep the numbers of this rank's heads. Raises ConfigError if that is not possible."""
        heads = self.shape.heads
        rows = {"": ranks.units(heads, heads)}
        self.tensors.take_shard(Shard((heads, 1), {"": slice(0, heads)}, rows, slice(0, 1)))

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        (tails, states), runs = self.state(batch)
        heads, dim = len(self.A_log), self.shape.head_dim
        vectors = (tails.shape[2] - heads * dim) // 2  # the width of b, and of c
        z, mixed, dt = self.inputs(x).split((heads * dim, tails.shape[2], heads), dim=1)
        mixed = self.conv(mixed, tails, runs)
        values, b, c = mixed.split((heads * dim, vectors, vectors), dim=1)
        y = selective_scan(
            values.unflatten(1, (heads, dim)),
            b.unflatten(1, (-1, self.shape.state)),
            c.unflatten(1, (-1, self.shape.state)),
            dt,
            self.A_log,
            self.D,
            self.dt_bias,
            states,
            runs,
            kernels=self.kernels,
        )
        return self.out(self.norm(y.flatten(1), z))
