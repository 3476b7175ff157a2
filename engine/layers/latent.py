"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434).

The cache has one row for each token: a latent vector and a rotated key that all heads share. A head
has weights that expand a latent to its own key and value. They are absorbed: queries are multiplied
with the weight of the keys before attention, and attended latents with that of the values after it.
Prefill and decode compute the same products, so a token's numbers do not depend on its chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec
from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.weights.heads import HeadsWeight
from engine.ops.kernels import Kernels
from engine.ops.rotary import apply_rotary, apply_rotary_pairs

EPS = 1e-6  # of the norms of both latents; the reference reads no setting for it


@dataclass(frozen=True, slots=True)
class LatentShape:
    """The sizes of a layer's latent attention; `query_rank` is None if queries have no latent."""

    heads: int
    query_rank: int | None
    latent: int  # kv_lora_rank
    plain_dim: int  # of each head's keys, without rotation
    rotated_dim: int  # of the key that all heads share
    value_dim: int
    rotates_pairs: bool  # adjacent dimensions, else both halves

    @property
    def query_dim(self) -> int:
        return self.plain_dim + self.rotated_dim

    def spec(self, scale: float) -> AttentionSpec:
        """Return the attention over the rows of the cache."""
        row = self.latent + self.rotated_dim
        return AttentionSpec(self.heads, 1, row, scale=scale, value_dim=self.latent)


class HeadsLinear(Linear):
    """Each head's weights from latents to keys and values; see HeadsWeight.

    They keep the dtype of the model when it is quantised.
    """

    takes_adapters = False

    def __init__(self, shape: LatentShape) -> None:
        outputs = shape.heads * (shape.plain_dim + shape.value_dim)
        units = {"": shape.heads}
        super().__init__(shape.latent, outputs, is_rounded=False, output_units=units)
        self.tensors: HeadsWeight = HeadsWeight(
            self._parameters, shape.heads, shape.plain_dim, shape.value_dim
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values [T, heads, value] of latents [T, heads, latent]."""
        return self.tensors.expand(x)

    def absorb(self, queries: torch.Tensor) -> torch.Tensor:
        """Return queries [T, heads, plain_dim] for latents, [T, heads, latent]."""
        return self.tensors.absorb(queries)


class LatentQueries(nn.Module):
    """Queries [T, heads * query_dim] of x [T, hidden], through a normed latent of their own."""

    def __init__(self, hidden: int, rank: int, shape: LatentShape, *, bias: bool) -> None:
        super().__init__()
        outputs = shape.heads * shape.query_dim
        self.down = Linear(hidden, rank, bias=bias)
        self.norm = RMSNorm(rank, EPS)
        self.up = Linear(rank, outputs, output_units={"": shape.heads})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(self.norm(self.down(x)))


class LatentAttention(nn.Module):
    """Multi-head latent attention of layer `index`.

    `bias` is that of the layers from `hidden` to a latent, and of the output.
    """

    def __init__(
        self, hidden: int, shape: LatentShape, index: int, *, scale: float, bias: bool = False
    ) -> None:
        super().__init__()
        self.shape = shape
        heads, rank = shape.heads, shape.query_rank
        self.q: Linear | LatentQueries
        if rank is None:
            self.q = Linear(hidden, heads * shape.query_dim, output_units={"": heads})
        else:
            self.q = LatentQueries(hidden, rank, shape, bias=bias)
        self.kv_down = Linear(hidden, shape.latent + shape.rotated_dim, bias=bias)
        self.kv_norm = RMSNorm(shape.latent, EPS)
        self.kv_up = HeadsLinear(shape)
        self.attend = Attention(shape.spec(scale), index)
        self.out = Linear(heads * shape.value_dim, hidden, bias=bias, input_units=heads)
        self.kernels: Kernels = "torch"

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """x [T, hidden], cos and sin [T, 1, rotated_dim] -> [T, hidden]."""
        shape, heads = self.shape, self.attend.spec.num_heads
        queries = self.q(x).view(len(x), heads, shape.query_dim)
        plain, rotated = queries.split((shape.plain_dim, shape.rotated_dim), dim=-1)
        latent, shared_key = self.kv_down(x).split((shape.latent, shape.rotated_dim), dim=-1)
        rotated = torch.cat((rotated, shared_key.unsqueeze(1)), dim=1)
        rotate = apply_rotary_pairs if shape.rotates_pairs else apply_rotary
        rotated = rotate(rotated, cos, sin, kernels=self.kernels)
        query = torch.cat((self.kv_up.absorb(plain), rotated[:, :heads]), dim=-1)
        key = torch.cat((self.kv_norm(latent).unsqueeze(1), rotated[:, heads:]), dim=-1)
        attended = self.attend(query, key, None, batch).unflatten(1, (heads, shape.latent))
        return self.out(self.kv_up(attended).flatten(1))
