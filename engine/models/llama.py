"""Llama 2, 3 and 3.1 (arXiv 2307.09288, 2407.21783).

RMSNorm, rotary position embedding, grouped-query attention and SwiGLU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec
from engine.checkpoint.weight_map import Names, WeightMap, targets_by_module
from engine.device.ranks import Ranks
from engine.layers.attention import RotaryAttention
from engine.layers.embedding import LMHead, ScaledTokenEmbedding
from engine.layers.experts import Experts, ExpertsShape
from engine.layers.folded import FoldableBlock, compute_folded, foldable, takes_rows
from engine.layers.linear import Linear
from engine.layers.mlp import ACTIVATIONS, GATED, MLP, GatedMLP
from engine.layers.norm import LayerNorm, RMSNorm
from engine.layers.rotary import RopeScaling, RotaryEmbedding, rope_theta
from engine.layers.rotary_sections import RotarySections
from engine.models.base import attention_heads, expect, layer_count, positive, positive_float
from engine.ops.norm import Tensors

# Our module name -> its name in a checkpoint.
NAMES = {
    "embed": "model.embed_tokens",
    "blocks.{i}.attention_norm": "model.layers.{i}.input_layernorm",
    "blocks.{i}.attention.qkv": "model.layers.{i}.self_attn.{part}_proj",
    "blocks.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_norm",
    "blocks.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_norm",
    "blocks.{i}.attention.out": "model.layers.{i}.self_attn.o_proj",
    "blocks.{i}.mlp_norm": "model.layers.{i}.post_attention_layernorm",
    "blocks.{i}.mlp.up": "model.layers.{i}.mlp.{part}_proj",
    "blocks.{i}.mlp.down": "model.layers.{i}.mlp.down_proj",
    "norm": "model.norm",
    "head": "lm_head",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """The config of a Llama checkpoint, or of a relative with the same computation."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    activation: str
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    tied: bool
    windows: tuple[int | None, ...]  # one per layer; None: full attention
    rotates: tuple[bool, ...]  # one per layer: whether it has rotary position embedding
    sections: RotarySections | None = None  # None: tokens have one position each
    pairs: bool = False  # whether neighbouring dimensions are rotated
    bidirectional: bool = False  # whether a token sees those after it, as in an encoder
    qk_norm: bool = False
    norm: type[RMSNorm] | type[LayerNorm] = RMSNorm
    gated: bool = True  # whether the feed-forward networks have a gate
    embed_scale: float = 1.0  # factor on token embeddings
    has_sinks: bool = False
    sees_whole_images: bool = False
    gates_attention: bool = False
    experts: ExpertsShape | None = None
    dense_layers: frozenset[int] = frozenset()  # these have no experts

    @classmethod
    def from_hf(cls, config: dict[str, Any], **own: Any) -> Self:
        """Read config.json. The fields in `own`, which a relative sets itself, take precedence.

        Raises ConfigError for a missing key or an unsupported variant.
        """
        gated = own.get("gated", True)
        expect(config, "hidden_act", *(GATED if gated else ACTIVATIONS))
        heads, kv_heads, head_dim = attention_heads(config)
        layers = layer_count(config)
        facts = {
            "vocab_size": positive(config, "vocab_size"),
            "hidden": positive(config, "hidden_size"),
            "intermediate": positive(config, "intermediate_size"),
            "layers": layers,
            "heads": heads,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "max_positions": positive(config, "max_position_embeddings"),
            "norm_eps": own.get("norm_eps") or positive_float(config, "rms_norm_eps"),
            "rope_theta": rope_theta(config),
            "rope_scaling": own.get("rope_scaling") or RopeScaling.from_hf(config),
            "activation": config.get("hidden_act", "silu"),
            "qkv_bias": bool(config.get("attention_bias", False)),
            "out_bias": bool(config.get("attention_bias", False)),
            "mlp_bias": bool(config.get("mlp_bias", False)),
            "tied": bool(config.get("tie_word_embeddings", False)),
            "windows": (None,) * layers,
            "rotates": (True,) * layers,
        }
        return cls(**(facts | own))


def llama_spec(
    config: LlamaConfig, index: int, *, scale: float | None = None, softcap: float | None = None
) -> AttentionSpec:
    """Return the spec of layer `index`. Relatives may set their own scale and softcap."""
    c = config
    return AttentionSpec(
        c.heads,
        c.kv_heads,
        c.head_dim,
        scale=c.head_dim**-0.5 if scale is None else scale,
        kind="full" if c.bidirectional else "causal",
        window=c.windows[index],
        softcap=softcap,
        has_sinks=c.has_sinks,
        sees_whole_images=c.sees_whole_images,
    )


def llama_attention(
    config: LlamaConfig,
    index: int,
    *,
    scale: float | None = None,
    softcap: float | None = None,
    mlp: nn.Module | None = None,
) -> RotaryAttention:
    """Return the attention of layer `index`, before its `mlp`; the rest is as in `llama_spec`."""
    c = config
    return RotaryAttention(
        c.hidden,
        llama_spec(c, index, scale=scale, softcap=softcap),
        index,
        qkv_bias=c.qkv_bias,
        out_bias=c.out_bias,
        qk_norm=_head_norm(c) if c.qk_norm else None,
        rotates=c.rotates[index],
        pairs=c.pairs,
        is_gated=c.gates_attention,
        next_up=mlp.up if isinstance(mlp, MLP) else None,
    )


def _head_norm(config: LlamaConfig) -> Callable[[], RMSNorm]:
    norm = config.norm
    assert issubclass(norm, RMSNorm)
    return partial(norm, config.head_dim, config.norm_eps)


def llama_mlp(config: LlamaConfig, index: int) -> nn.Module:
    """Return the feed-forward network of layer `index`, or its mixture of experts."""
    c = config
    if not c.gated:
        return MLP(c.hidden, c.intermediate, ACTIVATIONS[c.activation], bias=c.mlp_bias)
    if c.experts is None or index in c.dense_layers:
        return GatedMLP(c.hidden, c.intermediate, c.activation, bias=c.mlp_bias)
    return Experts(c.hidden, c.experts, c.activation)


class LlamaBlock(nn.Module):
    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        c = config
        self.attention_norm = c.norm(c.hidden, c.norm_eps)
        mlp = llama_mlp(c, index)
        self.attention: nn.Module = llama_attention(c, index, mlp=mlp)
        self.mlp_norm = c.norm(c.hidden, c.norm_eps)
        self.mlp = mlp

    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: ForwardBatch,
    ) -> Tensors:
        """Return the residual stream [T, hidden] and the MLP's output, not yet added to it.

        `x` and `delta` are these two values of the previous block.
        """
        x, normed = self.attention_norm.add(x, delta)
        x, normed = self.mlp_norm.add(x, self.attention(normed, cos, sin, batch))
        return x, self.mlp(normed)

    def foldable(self) -> FoldableBlock | None:
        """Return the layers, if `compute_folded` does what `forward` does."""
        if type(self).forward is not LlamaBlock.forward:
            return None
        return foldable(self.attention_norm, self.attention, self.mlp_norm, self.mlp)


class Llama(nn.Module):
    # A relative may have another block and other names of tensors.
    block: ClassVar[type[nn.Module]] = LlamaBlock
    names: ClassVar[Names] = NAMES

    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        return LlamaConfig.from_hf(config)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = self.read_config(config)
        self.embed = ScaledTokenEmbedding(
            c.vocab_size, c.hidden, c.embed_scale, dtype, divisible=True
        )
        self.rotary = RotaryEmbedding(
            c.head_dim,
            c.rope_theta,
            c.rope_scaling,
            max_positions,
            dtype,
            pairs=c.pairs,
            sections=c.sections,
        )
        self.blocks = nn.ModuleList(self.block(c, i) for i in range(c.layers))
        self.norm: RMSNorm | LayerNorm = c.norm(c.hidden, c.norm_eps)
        self.head = LMHead(c.vocab_size, c.hidden, tied_to=self.embed if c.tied else None)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        cos, sin = self.rotary(batch.positions)
        foldable = self._foldable() if takes_rows(self.embed, batch) else None
        if foldable is not None:
            return self.norm(compute_folded(self.embed, foldable, (cos, sin), batch))
        x, delta = self.inputs(batch), None
        for block in self.blocks:
            x, delta = block(x, delta, cos, sin, batch)
        return self.norm.add(x, delta)[1]

    def inputs(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the token embeddings [T, hidden], with those of images in their places."""
        x: torch.Tensor = self.embed(batch.input_ids)
        return x if batch.seen is None else batch.seen.place(x)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(hidden, out)

    def fold_sums(self, ranks: Ranks) -> None:
        """Let the norms add up the ranks' parts of what the layers before them compute.

        A norm and the sum before it then are one launch. Models with other blocks, norms or with
        biases stay as they are.
        """
        norms = [self.norm]
        layers: list[Linear] = []
        for block in self.blocks:
            if type(block) is not LlamaBlock or not isinstance(block.mlp, MLP):
                return
            assert isinstance(block.attention, RotaryAttention)
            norms += [block.attention_norm, block.mlp_norm]
            layers += [block.attention.out, block.mlp.down]
        has_bias = any(layer.bias is not None for layer in layers)
        if has_bias or not issubclass(self.config.norm, RMSNorm):
            return
        for layer in layers:
            layer.leaves_sum = True
        for norm in norms:
            assert isinstance(norm, RMSNorm)
            norm.delta_ranks = ranks

    def _foldable(self) -> list[FoldableBlock] | None:
        """Return the layers of all blocks, or None if one is computed op by op."""
        blocks = [each.foldable() for each in self.blocks if isinstance(each, LlamaBlock)]
        found = [block for block in blocks if block is not None]
        return found if len(found) == len(self.blocks) else None

    def weight_map(self) -> WeightMap:
        aliases = {"model.embed_tokens.weight": ("lm_head.weight",)} if self.config.tied else {}
        targets = targets_by_module(self, self.names)
        return WeightMap(targets, aliases=aliases, ignored=("rotary_emb.inv_freq",))
