"""Decoder layers in a few launches: each linear layer takes in the norm, sum or activation at it.

A decode of few rows takes the time to read the weights, so that every further launch counts. The
kernels take in the parts of plain pre-norm layers: RMS norms, weights in bf16 that one device holds
whole, and a residual stream. All other layers are computed op by op.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.layers.attention import RotaryAttention
from engine.layers.embedding import TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.mlp import MLP
from engine.layers.norm import RMSNorm
from engine.ops.folded import (
    KINDS,
    RowNorm,
    Stream,
    embed_stream,
    linear_add,
    max_folded_rows,
    norm_linear,
)
from engine.ops.rotary import Angles

# In fp16, products of the stream and a norm's weight may be too large before they are scaled.
DTYPE = torch.bfloat16


class FoldableBlock(NamedTuple):
    """The layers of a pre-norm block; the kernels can compute each one."""

    attention_norm: RMSNorm
    attention: RotaryAttention
    mlp_norm: RMSNorm
    mlp: MLP


def foldable(
    attention_norm: nn.Module, attention: nn.Module, mlp_norm: nn.Module, mlp: nn.Module
) -> FoldableBlock | None:
    """Return the layers of a block, or None if one of them needs other kernels."""
    if not isinstance(attention_norm, RMSNorm) or not isinstance(mlp_norm, RMSNorm):
        return None
    if not isinstance(attention, RotaryAttention):
        return None
    if not isinstance(mlp, MLP) or mlp.activation not in KINDS:
        return None
    if not all(_is_plain(each) for each in (attention.qkv, attention.out, mlp.up, mlp.down)):
        return None
    return FoldableBlock(attention_norm, attention, mlp_norm, mlp)


def takes_rows(embedding: TokenEmbedding, batch: ForwardBatch) -> bool:
    """Return whether the kernels are used for the tokens of a decoder with this embedding."""
    if batch.adds_apart or batch.seen is not None:
        return False
    if embedding.kernels != "triton" or embedding.weight.dtype != DTYPE:
        return False
    if embedding.tensors.shard is not None:
        return False
    return 0 < len(batch.input_ids) <= max_folded_rows(batch.input_ids.device)


def compute_folded(
    embedding: TokenEmbedding, blocks: Sequence[FoldableBlock], angles: Angles, batch: ForwardBatch
) -> torch.Tensor:
    """Return the residual stream [T, hidden] after all blocks: four launches and attention each."""
    stream = embed_stream(batch.input_ids, embedding.weight, embedding.scale)
    for block in blocks:
        projections = _normed(stream, block.attention_norm, block.attention.qkv)
        attended = block.attention.attended(projections, *angles, batch)
        stream = _added(stream, block.attention.out, attended)
        gated = _normed(stream, block.mlp_norm, block.mlp.up, KINDS[block.mlp.activation])
        stream = _added(stream, block.mlp.down, gated)
    return stream.x


def _is_plain(linear: Linear) -> bool:
    """Return whether kernels read the weight of this layer as it is, and nothing is added to it."""
    weights = linear.tensors
    if weights.packed is not None or weights.shard is not None or linear.adapters is not None:
        return False
    return weights.plain.dtype == DTYPE


def _normed(stream: Stream, norm: RMSNorm, linear: Linear, kind: str | None = None) -> torch.Tensor:
    """Return linear(norm(stream)), or with `kind` that gated activation of it."""
    before = RowNorm(norm.weight, norm.eps, norm.offset)
    return norm_linear(stream, before, linear.tensors.plain, linear.tensors.bias, kind)


def _added(stream: Stream, linear: Linear, x: torch.Tensor) -> Stream:
    """Return the stream plus linear(x), for x [T, in]."""
    return linear_add(x, linear.tensors.plain, linear.tensors.bias, stream)
