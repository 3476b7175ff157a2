"""Llama 2, 3 and 3.1 (arXiv 2307.09288, 2407.21783): RMSNorm, rotary, grouped queries, SwiGLU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec
from engine.errors import ConfigError
from engine.layers.attention import Attention
from engine.layers.embedding import Embedding, LMHead
from engine.layers.linear import Linear
from engine.layers.norm import RMSNorm
from engine.layers.rotary import RopeScaling, RotaryEmbedding, rope_theta
from engine.models.base import expect, positive, positive_float
from engine.ops.gated import silu_mul
from engine.ops.rotary import apply_rotary
from engine.weights.rules import Target, WeightMap


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The facts of a Llama checkpoint."""

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
    attention_bias: bool
    mlp_bias: bool
    tied: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> LlamaConfig:
        """From config.json; raises ConfigError for a missing key or a variant not computed here."""
        expect(config, "hidden_act", "silu")
        heads, hidden = positive(config, "num_attention_heads"), positive(config, "hidden_size")
        kv_heads = positive(config, "num_key_value_heads", heads)
        head_dim = positive(config, "head_dim", max(hidden // heads, 1))
        if heads % kv_heads:
            raise ConfigError(
                f"config.json has {heads} attention heads and {kv_heads} key/value heads; each of "
                "these must serve equally many of those."
            )
        if head_dim % 2:
            raise ConfigError(f"config.json has head_dim = {head_dim}; rotary needs an even one.")
        return cls(
            vocab_size=positive(config, "vocab_size"),
            hidden=hidden,
            intermediate=positive(config, "intermediate_size"),
            layers=positive(config, "num_hidden_layers"),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_positions=positive(config, "max_position_embeddings"),
            norm_eps=positive_float(config, "rms_norm_eps"),
            rope_theta=rope_theta(config),
            rope_scaling=RopeScaling.from_hf(config),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            tied=bool(config.get("tie_word_embeddings", False)),
        )


class LlamaAttention(nn.Module):
    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        c, dim = config, config.head_dim
        self.spec = AttentionSpec(c.heads, c.kv_heads, dim, scale=dim**-0.5)
        sizes = {"q": c.heads * dim, "k": c.kv_heads * dim, "v": c.kv_heads * dim}
        self.qkv = Linear(c.hidden, sizes, bias=c.attention_bias)
        self.out = Linear(c.heads * dim, c.hidden, bias=c.attention_bias)
        self.attend = Attention(self.spec, index)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        heads, kv_heads = self.spec.num_heads, self.spec.num_kv_heads
        qkv = self.qkv(x).view(len(x), heads + 2 * kv_heads, self.spec.head_dim)
        qk = apply_rotary(qkv[:, : heads + kv_heads], cos, sin)
        return self.out(
            self.attend(qk[:, :heads], qk[:, heads:], qkv[:, heads + kv_heads :], batch)
        )


class LlamaMLP(nn.Module):
    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        sizes = {"gate": config.intermediate, "up": config.intermediate}
        self.gate_up = Linear(config.hidden, sizes, bias=config.mlp_bias)
        self.down = Linear(config.intermediate, config.hidden, bias=config.mlp_bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(silu_mul(self.gate_up(x)))


class LlamaBlock(nn.Module):
    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = LlamaAttention(config, index)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, batch)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = LlamaConfig.from_hf(config)
        self.vocab_size = c.vocab_size
        self.embed = Embedding(c.vocab_size, c.hidden)
        self.rotary = RotaryEmbedding(
            c.head_dim, c.rope_theta, c.rope_scaling, max_positions, dtype
        )
        self.blocks = nn.ModuleList(LlamaBlock(c, i) for i in range(c.layers))
        self.norm = RMSNorm(c.hidden, c.norm_eps)
        self.head = LMHead(c.vocab_size, c.hidden, tied_to=self.embed if c.tied else None)
        self.specs = [layer.spec for layer in self.modules() if isinstance(layer, Attention)]

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x = self.embed(batch.input_ids)
        cos, sin = self.rotary(batch.positions)
        for block in self.blocks:
            x = block(x, cos, sin, batch)
        return self.norm(x)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.head(hidden)

    def weight_map(self) -> WeightMap:
        targets = {
            "model.embed_tokens.weight": Target("embed.weight"),
            "model.norm.weight": Target("norm.weight"),
        }
        if not self.config.tied:
            targets["lm_head.weight"] = Target("head.weight")
        linears = {
            "self_attn.q_proj": ("attention.qkv", "q", self.config.attention_bias),
            "self_attn.k_proj": ("attention.qkv", "k", self.config.attention_bias),
            "self_attn.v_proj": ("attention.qkv", "v", self.config.attention_bias),
            "self_attn.o_proj": ("attention.out", "", self.config.attention_bias),
            "mlp.gate_proj": ("mlp.gate_up", "gate", self.config.mlp_bias),
            "mlp.up_proj": ("mlp.gate_up", "up", self.config.mlp_bias),
            "mlp.down_proj": ("mlp.down", "", self.config.mlp_bias),
        }
        for i in range(self.config.layers):
            layer, block = f"model.layers.{i}", f"blocks.{i}"
            targets[f"{layer}.input_layernorm.weight"] = Target(f"{block}.attention_norm.weight")
            targets[f"{layer}.post_attention_layernorm.weight"] = Target(f"{block}.mlp_norm.weight")
            for name, (module, part, bias) in linears.items():
                for kind in ("weight", "bias") if bias else ("weight",):
                    targets[f"{layer}.{name}.{kind}"] = Target(f"{block}.{module}.{kind}", part)
        tied_copies = ("lm_head.weight",) if self.config.tied else ()
        return WeightMap(targets, ignored=("rotary_emb.inv_freq", *tied_copies))
