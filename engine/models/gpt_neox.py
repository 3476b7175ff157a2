"""GPT-NeoX and Pythia (arXiv 2204.06745, 2304.01373).

LayerNorm with bias, rotary embedding on a part of each head, and a plain MLP. Attention and MLP may
read the same stream, side by side.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec
from engine.checkpoint.weight_map import WeightMap, targets_by_module
from engine.layers.attention import RotaryAttention
from engine.layers.embedding import LMHead, TokenEmbedding
from engine.layers.mlp import ACTIVATIONS, MLP
from engine.layers.norm import Join, LayerNorm
from engine.layers.rotary import RopeScaling, RotaryEmbedding, rope_theta
from engine.models.base import expect, layer_count, positive, positive_float, shared_by
from engine.ops.norm import Tensors

# Our module name -> its name in a checkpoint.
NAMES = {
    "embed": "gpt_neox.embed_in",
    "blocks.{i}.attention_norm": "gpt_neox.layers.{i}.input_layernorm",
    "blocks.{i}.attention.qkv": "gpt_neox.layers.{i}.attention.query_key_value",
    "blocks.{i}.attention.out": "gpt_neox.layers.{i}.attention.dense",
    "blocks.{i}.mlp_norm": "gpt_neox.layers.{i}.post_attention_layernorm",
    "blocks.{i}.mlp.up": "gpt_neox.layers.{i}.mlp.dense_h_to_4h",
    "blocks.{i}.mlp.down": "gpt_neox.layers.{i}.mlp.dense_4h_to_h",
    "norm": "gpt_neox.final_layer_norm",
    "head": "embed_out",
}
HEAD, NEW_HEAD = "embed_out.weight", "lm_head.weight"  # in files, and in today's transformers
THETA = 10000.0  # if config.json has no rotary_emb_base
ROTARY_SHARE = 0.25  # if config.json has no rotary_pct


@dataclass(frozen=True, slots=True)
class GPTNeoXConfig:
    """The config of a GPT-NeoX checkpoint."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    max_positions: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling
    activation: str
    attention_bias: bool
    is_parallel: bool  # whether attention and MLP read the same stream
    tied: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> GPTNeoXConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        expect(config, "hidden_act", "gelu", "gelu_fast", "gelu_new", "gelu_pytorch_tanh", "relu")
        hidden, heads = shared_by(config, "hidden_size", "num_attention_heads")
        rotary = _rotary(config)
        return cls(
            vocab_size=positive(config, "vocab_size"),
            hidden=hidden,
            intermediate=positive(config, "intermediate_size"),
            layers=layer_count(config),
            heads=heads,
            max_positions=positive(config, "max_position_embeddings"),
            norm_eps=positive_float(config, "layer_norm_eps"),
            rope_theta=rope_theta(rotary),
            rope_scaling=RopeScaling.from_hf(rotary, partial=True),
            activation=config.get("hidden_act", "gelu"),
            attention_bias=bool(config.get("attention_bias", True)),
            is_parallel=bool(config.get("use_parallel_residual", True)),
            tied=bool(config.get("tie_word_embeddings", False)),
        )


def _rotary(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with Llama's keys for the rotary settings outside of rope_parameters."""
    theta = config.get("rotary_emb_base")
    if theta is None:
        theta = THETA
    share = config.get("rotary_pct")
    if share is None:
        share = ROTARY_SHARE
    expect(config, "rope_theta", None, theta)
    return config | {"rope_theta": theta, "partial_rotary_factor": share}


class GPTNeoXBlock(nn.Module):
    def __init__(self, config: GPTNeoXConfig, index: int) -> None:
        super().__init__()
        c, dim = config, config.hidden // config.heads
        spec = AttentionSpec(c.heads, c.heads, dim, scale=dim**-0.5)
        bias = c.attention_bias
        self.is_parallel = c.is_parallel
        self.attention_norm = LayerNorm(c.hidden, c.norm_eps)
        self.attention = RotaryAttention(c.hidden, spec, index, qkv_bias=bias, out_bias=bias)
        self.mlp_norm = LayerNorm(c.hidden, c.norm_eps)
        self.joined = Join()
        self.mlp = MLP(c.hidden, c.intermediate, ACTIVATIONS[c.activation], bias=True)

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
        attended = self.attention(normed, cos, sin, batch)
        if self.is_parallel:
            _, normed = self.mlp_norm.add(x, None)
            x, _ = self.joined.add(x, attended)
        else:
            x, normed = self.mlp_norm.add(x, attended)
        return x, self.mlp(normed)


class GPTNeoX(nn.Module):
    @staticmethod
    def read_config(config: dict[str, Any]) -> GPTNeoXConfig:
        return GPTNeoXConfig.from_hf(config)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = self.read_config(config)
        self.embed = TokenEmbedding(c.vocab_size, c.hidden, divisible=True)
        self.rotary = RotaryEmbedding(
            c.hidden // c.heads, c.rope_theta, c.rope_scaling, max_positions, dtype
        )
        self.blocks = nn.ModuleList(GPTNeoXBlock(c, i) for i in range(c.layers))
        self.norm = LayerNorm(c.hidden, c.norm_eps)
        self.head = LMHead(c.vocab_size, c.hidden, tied_to=self.embed if c.tied else None)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x, delta = self.embed(batch.input_ids), None
        cos, sin = self.rotary(batch.positions)
        for block in self.blocks:
            x, delta = block(x, delta, cos, sin, batch)
        return self.norm.add(x, delta)[1]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(hidden, out)

    def weight_map(self) -> WeightMap:
        """Return the WeightMap. In query_key_value, q, k and v of each head follow one another."""
        targets = targets_by_module(self, NAMES)
        for name, target in targets.items():
            if ".query_key_value." in name:
                targets[name] = replace(target, groups=self.config.heads)
        aliases = {HEAD: [NEW_HEAD]}
        if self.config.tied:
            aliases = {"gpt_neox.embed_in.weight": [HEAD, NEW_HEAD]}
        # Causal masks and frequencies in old files.
        buffers = ("bias", "masked_bias", "rotary_emb.inv_freq")
        ignored = [f".attention.{name}" for name in buffers]
        return WeightMap(targets, aliases=aliases, ignored=ignored)
