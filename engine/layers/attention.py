"""Attention layers: the connection between a model's layers and the paged KV cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.fused import FusedPlan
from engine.attention.spec import AttentionSpec
from engine.checkpoint.parameters import LoadedLayer
from engine.device.ranks import UNEVEN, Ranks, Shard
from engine.errors import ConfigError
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.ops.gated import sigmoid_mul
from engine.ops.kernels import Kernels
from engine.ops.rotary import Angles, HeadNorm, Rotation, norm_and_rotate, rotate_and_store


class Attention(nn.Module):
    """Attention of layer `index`, computed by the step's AttentionPlan. It has no weights.

    A layer that `reads` the KV of an earlier layer, the one with this index, has none of its own.
    """

    def __init__(self, spec: AttentionSpec, index: int = -1, *, reads: int | None = None) -> None:
        super().__init__()
        self.spec = spec
        self.index = index if reads is None else reads
        self.has_kv = spec.kind != "full" and reads is None
        self.kernels: Kernels = "torch"

    def divide(self, ranks: Ranks) -> None:
        """Keep the heads of this rank, which the layers around it give it.

        Raises ConfigError if that is not possible.
        """
        spec = self.spec
        if spec.num_heads % ranks.count:
            raise ConfigError(f"has {spec.num_heads} heads, which {ranks.count} {UNEVEN}")
        shard = ranks.units(spec.num_kv_heads, spec.num_kv_heads)
        self.spec = replace(
            spec, num_heads=spec.num_heads // ranks.count, num_kv_heads=shard.stop - shard.start
        )

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        batch: ForwardBatch,
        bias: torch.Tensor | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """q [T, H, D], k and v [T, Hkv, D] (None if another layer's KV is read) -> [T, H * D].

        With the spec's `value_dim`, v is None and the result [T, H * value_dim].
        A cross layer's k and v are None, too: `store` has written them. `bias` and `sinks` are as
        in AttentionPlan.attend. An encoder's layer has no KV and ignores `index`.
        """
        kv = None if self.spec.kind == "full" else batch.kv.layers[self.index]
        if padding := len(q) - batch.num_tokens:
            q = q[: batch.num_tokens]
            k, v = (None if x is None else x[: batch.num_tokens] for x in (k, v))
        out = batch.plan.attend(self.spec, kv, q, k, v, bias, sinks).flatten(1)
        return F.pad(out, (0, 0, 0, padding)) if padding else out

    def rotate_and_attend(
        self,
        qk: torch.Tensor,
        v: torch.Tensor,
        angles: Angles | None,
        norm: HeadNorm | None,
        batch: ForwardBatch,
        sinks: torch.Tensor | None = None,
        *,
        pairs: bool = False,
        next_linears: Sequence[Linear] = (),
    ) -> torch.Tensor:
        """Norm and rotate queries and keys `qk` [T, H + Hkv, D], then attend as in `forward`.

        `angles`, `norm` and `pairs` are as in `norm_and_rotate`. A GPU may fetch the weights of
        `next_linears` into its cache meanwhile.
        """
        heads = self.spec.num_heads
        padded = len(qk) > batch.num_tokens  # padding has no slot in the cache
        kv = None if self.spec.kind == "full" else batch.kv.layers[self.index]
        # The fused kernel stores the KV, and no codes.
        if self.kernels != "triton" or padded or kv is None or kv.key_scales is not None:
            qk = norm_and_rotate(qk, heads, angles, norm, pairs=pairs, kernels=self.kernels)
            return self(qk[:, :heads], qk[:, heads:], v, batch, sinks=sinks)
        if isinstance(batch.plan, FusedPlan) and batch.plan.fuses(self.spec, kv):
            rotation = Rotation(angles, norm, pairs)
            weights = [linear.weight for linear in next_linears if linear.weight is not None]
            return batch.plan.rotate_and_attend(
                self.spec, kv, qk, v, rotation, sinks, weights
            ).flatten(1)
        layout = batch.plan.layout
        blocks = layout.groups[kv.group].token_blocks
        assert kv.values is not None
        cache = (kv.keys, kv.values, blocks, layout.token_offsets)
        qkv = (qk[:, :heads], qk[:, heads:], v)
        q = rotate_and_store(qkv, angles, cache, norm, pairs=pairs)
        return batch.plan.attend(self.spec, kv, q, None, None, sinks=sinks).flatten(1)

    def store(self, k: torch.Tensor, v: torch.Tensor, batch: ForwardBatch) -> None:
        """Write the source's keys and values [T, Hkv, D] of a cross layer; once per source."""
        tokens = slice(batch.num_tokens)
        batch.plan.store(batch.kv.layers[self.index], k[tokens], v[tokens])


def kv_specs(*modules: nn.Module) -> list[AttentionSpec]:
    """Return the specs of layers with KV of their own, ordered by their `index`.

    `modules` are a model, and its prediction head if that is used.
    """
    every = [layer for module in modules for layer in module.modules()]
    layers = [layer for layer in every if isinstance(layer, Attention)]
    layers = sorted((a for a in layers if a.has_kv), key=lambda a: a.index)
    indices = [layer.index for layer in layers]
    assert indices == list(range(len(layers))), (
        f"layers with KV must have the indices 0, 1, …; got {indices}"
    )
    return [layer.spec for layer in layers]


class RotaryAttention(LoadedLayer):
    """Grouped-query attention (arXiv 2305.13245) of layer `index` with rotary embedding.

    `qk_norm` constructs the norm over head_dim that is applied to the queries and keys of each head
    before the rotation (arXiv 2302.05442). Without `rotates`, positions have no embedding
    (arXiv 2305.19466). With `pairs`, neighbouring dimensions are rotated, by such a
    RotaryEmbedding. If it `is_gated`, each head's output is multiplied by the sigmoid of a gate
    (arXiv 2505.06708). `next_up` is the linear layer that follows the output's, if it is known.
    """

    def __init__(
        self,
        hidden: int,
        spec: AttentionSpec,
        index: int = -1,
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm: Callable[[], RMSNorm] | None = None,
        rotates: bool = True,
        pairs: bool = False,
        is_gated: bool = False,
        next_up: Linear | None = None,
    ) -> None:
        super().__init__()
        self.rotates, self.pairs, self.is_gated = rotates, pairs, is_gated
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        queries = heads * spec.head_dim
        units = {"q": heads, "k": kv_heads, "v": kv_heads}
        if is_gated:
            units["gate"] = heads
        sizes = {part: count * spec.head_dim for part, count in units.items()}
        self.qkv = Linear(hidden, sizes, bias=qkv_bias, output_units=units)
        self.q_norm = qk_norm() if qk_norm else None
        self.k_norm = qk_norm() if qk_norm else None
        self.sinks = nn.Parameter(torch.empty(heads)) if spec.has_sinks else None
        self.attend = Attention(spec, index)
        self.out = Linear(queries, hidden, bias=out_bias, input_units=heads)
        # A tuple, in which a module is not found as a part of this one.
        self.next_linears = (self.out,) if next_up is None else (self.out, next_up)
        self.kernels: Kernels = "torch"

    def forward(
        self,
        x: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: ForwardBatch,
        query_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [T, hidden], cos and sin [T, 1, rotated dimensions] -> [T, hidden].

        `query_scale` [T, 1, 1] is a factor on each token's queries, which have no norm then.
        """
        return self.out(self.attended(self.qkv(x), cos, sin, batch, query_scale))

    def attended(
        self,
        projections: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: ForwardBatch,
        query_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute the part between `qkv` and `out`: [T, heads of all parts * D] -> [T, H * D]."""
        spec = self.attend.spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = projections.view(len(projections), -1, spec.head_dim)
        if query_scale is not None:
            assert self.q_norm is None, "a norm would undo the scale"
            qkv[:, :heads].mul_(query_scale)
        qk, v, gate = qkv.tensor_split((heads + kv_heads, heads + 2 * kv_heads), dim=1)
        angles = (cos, sin) if self.rotates else None
        attended = self.attend.rotate_and_attend(
            qk,
            v,
            angles,
            self._norm(),
            batch,
            self.sinks,
            pairs=self.pairs,
            next_linears=self.next_linears,
        )
        if self.is_gated:
            attended = sigmoid_mul(attended, gate.flatten(1), self.kernels)
        return attended

    def divide(self, ranks: Ranks) -> None:
        """Keep the sinks of this rank's heads. Raises ConfigError if that is not possible."""
        if self.sinks is not None:
            heads = len(self.sinks)
            rows = {"": ranks.units(heads, heads)}
            self.tensors.take_shard(Shard((heads, 1), {"": slice(0, heads)}, rows, slice(0, 1)))

    def _norm(self) -> HeadNorm | None:
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None:
            return None
        return HeadNorm(q_norm.weight, k_norm.weight, q_norm.eps, q_norm.offset)


class SelfAttention(nn.Module):
    """Multi-head self-attention (arXiv 1706.03762) of layer `index`, without rotation."""

    def __init__(
        self, hidden: int, spec: AttentionSpec, index: int = -1, *, bias: bool = False
    ) -> None:
        super().__init__()
        heads, parts = spec.num_heads, ("q", "k", "v")
        size = heads * spec.head_dim
        self.qkv = Linear(
            hidden,
            dict.fromkeys(parts, size),
            bias=bias,
            output_units=dict.fromkeys(parts, heads),
        )
        self.attend = Attention(spec, index)
        self.out = Linear(size, hidden, bias=bias, input_units=heads)

    def forward(
        self, x: torch.Tensor, batch: ForwardBatch, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x [T, hidden], `bias` as in AttentionPlan.attend -> [T, hidden]."""
        q, k, v = self.qkv(x).view(len(x), 3, self.attend.spec.num_heads, -1).unbind(1)
        return self.out(self.attend(q, k, v, batch, bias))


class CrossAttention(nn.Module):
    """Attention of generated tokens to their source. `store` writes the source's KV first."""

    def __init__(self, hidden: int, spec: AttentionSpec, index: int, *, bias: bool = False) -> None:
        super().__init__()
        heads, parts = spec.num_heads, ("k", "v")
        size = heads * spec.head_dim
        self.q = Linear(hidden, size, bias=bias, output_units={"": heads})
        self.kv = Linear(
            hidden,
            dict.fromkeys(parts, size),
            bias=bias,
            output_units=dict.fromkeys(parts, heads),
        )
        self.attend = Attention(spec, index)
        self.out = Linear(size, hidden, bias=bias, input_units=heads)

    def store(self, source: torch.Tensor, batch: ForwardBatch) -> None:
        """Write a source's KV, from the encoder's hidden states [T, hidden]; once per source."""
        k, v = self.kv(source).view(len(source), 2, self.attend.spec.num_heads, -1).unbind(1)
        self.attend.store(k, v, batch)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        q = self.q(x).view(len(x), self.attend.spec.num_heads, -1)
        return self.out(self.attend(q, None, None, batch))
