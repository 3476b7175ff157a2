"""GPT-2 (Radford et al., 2019): learned positions, LayerNorm with bias, the tanh form of GELU."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec
from engine.checkpoint.weight_map import WeightMap, targets_by_module
from engine.layers.attention import Attention
from engine.layers.embedding import LMHead, TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.mlp import ACTIVATIONS, MLP
from engine.layers.norm import LayerNorm
from engine.models.base import expect, layer_count, positive, positive_float, shared_by
from engine.ops.norm import Tensors

# Our module name -> its name in a checkpoint.
NAMES = {
    "embed": "wte",
    "position": "wpe",
    "blocks.{i}.attention_norm": "h.{i}.ln_1",
    "blocks.{i}.qkv": "h.{i}.attn.c_attn",
    "blocks.{i}.out": "h.{i}.attn.c_proj",
    "blocks.{i}.mlp_norm": "h.{i}.ln_2",
    "blocks.{i}.mlp.up": "h.{i}.mlp.c_fc",
    "blocks.{i}.mlp.down": "h.{i}.mlp.c_proj",
    "norm": "ln_f",
    "head": "lm_head",
}


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """The config of a GPT-2 checkpoint."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    max_positions: int
    norm_eps: float
    activation: str
    tied: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> GPT2Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        expect(config, "activation_function", "gelu_new", "gelu_pytorch_tanh", "gelu", "relu")
        expect(config, "scale_attn_weights", True)
        expect(config, "scale_attn_by_inverse_layer_idx", False)
        hidden, heads = shared_by(config, "n_embd", "n_head")
        return cls(
            vocab_size=positive(config, "vocab_size"),
            hidden=hidden,
            intermediate=positive(config, "n_inner", 4 * hidden),
            layers=layer_count(config, "n_layer"),
            heads=heads,
            max_positions=positive(config, "n_positions"),
            norm_eps=positive_float(config, "layer_norm_epsilon"),
            activation=config.get("activation_function", "gelu_new"),
            tied=bool(config.get("tie_word_embeddings", True)),
        )


class GPT2Block(nn.Module):
    def __init__(self, config: GPT2Config, index: int) -> None:
        super().__init__()
        c, dim = config, config.hidden // config.heads
        spec = AttentionSpec(c.heads, c.heads, dim, scale=dim**-0.5)
        parts = ("q", "k", "v")
        self.attention_norm = LayerNorm(c.hidden, c.norm_eps)
        self.qkv = Linear(
            c.hidden,
            dict.fromkeys(parts, c.hidden),
            bias=True,
            output_units=dict.fromkeys(parts, c.heads),
        )
        self.attend = Attention(spec, index)
        self.out = Linear(c.hidden, c.hidden, bias=True, input_units=c.heads)
        self.mlp_norm = LayerNorm(c.hidden, c.norm_eps)
        self.mlp = MLP(c.hidden, c.intermediate, ACTIVATIONS[c.activation], bias=True)

    def forward(self, x: torch.Tensor, delta: torch.Tensor | None, batch: ForwardBatch) -> Tensors:
        """Return the residual stream [T, hidden] and the MLP's output, not yet added to it.

        `x` and `delta` are these two values of the previous block.
        """
        x, normed = self.attention_norm.add(x, delta)
        qkv = self.qkv(normed).view(len(x), 3, self.attend.spec.num_heads, -1)
        attended = self.out(self.attend(qkv[:, 0], qkv[:, 1], qkv[:, 2], batch))
        x, normed = self.mlp_norm.add(x, attended)
        return x, self.mlp(normed)


class GPT2(nn.Module):
    @staticmethod
    def read_config(config: dict[str, Any]) -> GPT2Config:
        return GPT2Config.from_hf(config)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = self.read_config(config)
        self.embed = TokenEmbedding(c.vocab_size, c.hidden, divisible=True)
        self.position = TokenEmbedding(c.max_positions, c.hidden)
        self.blocks = nn.ModuleList(GPT2Block(c, i) for i in range(c.layers))
        self.norm = LayerNorm(c.hidden, c.norm_eps)
        self.head = LMHead(c.vocab_size, c.hidden, tied_to=self.embed if c.tied else None)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x, delta = self.embed(batch.input_ids) + self.position(batch.positions), None
        for block in self.blocks:
            x, delta = block(x, delta, batch)
        return self.norm.add(x, delta)[1]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self.head(hidden, out)

    def weight_map(self) -> WeightMap:
        targets = targets_by_module(self, NAMES)
        for name, target in targets.items():
            if ".c_" in name and name.endswith(".weight"):  # Conv1D stores [in, out]
                targets[name] = replace(target, transpose=True)
        ignored = [".attn.bias", ".attn.masked_bias"]  # causal masks in old files
        aliases = {"wte.weight": ("lm_head.weight",)} if self.config.tied else {}
        return WeightMap(targets, ("transformer.", ""), aliases=aliases, ignored=ignored)
