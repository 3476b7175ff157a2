"""GatedDeltaNet (arXiv 2412.06464), as in Qwen3-Next: linear attention by the gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.checkpoint.parameters import LoadedLayer
from engine.device.ranks import UNEVEN, Ranks, Shard
from engine.errors import ConfigError
from engine.layers.linear import Linear
from engine.layers.norm import GatedRMSNorm
from engine.layers.recurrent import CausalConv
from engine.layers.state import LayerState, StatePart
from engine.ops.gated_delta import gated_delta
from engine.ops.kernels import Kernels


@dataclass(frozen=True, slots=True)
class DeltaShape:
    """Sizes of a GatedDeltaNet. Several value heads share a key head."""

    key_heads: int
    value_heads: int
    key_dim: int  # of a head
    value_dim: int
    conv_width: int


class GatedDeltaNet(LoadedLayer):
    """out(norm(delta_rule(silu(conv(q, k, v)), a, b)) * silu(z)) of projections of the input.

    `index` is the number of the layer among those with a state. The state has the last inputs of
    the convolution, q before k before v, and the matrix of each value head in fp32.
    """

    def __init__(self, hidden: int, shape: DeltaShape, index: int, norm_eps: float) -> None:
        super().__init__()
        self.shape = shape
        keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
        heads = {"q": shape.key_heads, "k": shape.key_heads, "v": shape.value_heads}
        sizes = {"q": keys, "k": keys, "v": values}
        gated, gated_heads = sizes | {"z": values}, heads | {"z": shape.value_heads}
        self.inputs = Linear(hidden, gated, output_units=gated_heads)
        # The strength of each write, and the decay; rounding them would change all later tokens.
        rates = dict.fromkeys(("b", "a"), shape.value_heads)
        self.rates = Linear(hidden, rates, is_rounded=False, output_units=rates)
        self.conv = CausalConv(sizes, shape.conv_width, units=heads, silu=True)
        self.A_log = nn.Parameter(torch.empty(shape.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(shape.value_heads))
        self.state = LayerState(
            index,
            StatePart((shape.conv_width - 1, sum(sizes.values())), dim=1),
            StatePart((shape.value_heads, shape.key_dim, shape.value_dim), torch.float32),
        )
        self.norm = GatedRMSNorm(shape.value_dim, norm_eps)
        self.out = Linear(values, hidden, input_units=shape.value_heads)
        self.kernels: Kernels = "torch"

    def divide(self, ranks: Ranks) -> None:
        """Keep this rank's heads. Raises ConfigError if that is not possible."""
        heads = len(self.A_log)
        if self.shape.key_heads % ranks.count:  # its share of the state would be larger than others
            raise ConfigError(f"has {self.shape.key_heads} key heads, which {ranks.count} {UNEVEN}")
        rows = {"": ranks.units(heads, heads)}
        self.tensors.take_shard(Shard((heads, 1), {"": slice(0, heads)}, rows, slice(0, 1)))

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        key_dim, value_dim = self.shape.key_dim, self.shape.value_dim
        heads = len(self.A_log)
        (tails, states), runs = self.state(batch)
        qkv, z = self.inputs(x).tensor_split((-heads * value_dim,), dim=1)
        b, a = self.rates(x).chunk(2, dim=1)
        qkv = self.conv(qkv, tails, runs)
        qk, v = qkv.tensor_split((-heads * value_dim,), dim=1)
        q, k = qk.unflatten(1, (2, -1, key_dim)).unbind(1)
        v, z = v.unflatten(1, (heads, value_dim)), z.unflatten(1, (heads, value_dim))
        decay = self.A_log, self.dt_bias
        read = gated_delta(q, k, v, a, b, *decay, states, runs, kernels=self.kernels)
        return self.out(self.norm(read, z).flatten(1))
