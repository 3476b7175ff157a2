"""Marian: the original Transformer (arXiv 1706.03762) in the layout of Marian's checkpoints.

Sinusoidal positions, post-norm blocks, and biases in all linears.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec
from engine.checkpoint.weight_map import WeightMap, targets_by_module
from engine.layers.attention import CrossAttention, SelfAttention
from engine.layers.embedding import LMHead, Sinusoids, TokenEmbedding
from engine.layers.mlp import ACTIVATIONS, MLP
from engine.layers.norm import LayerNorm
from engine.models.base import expect, layer_count, positive, shared_by

NORM_EPS = 1e-5
# Variants that Marian can train or that BART, whose layout Marian uses, computes. Unsupported.
VARIANTS = ("normalize_before", "normalize_embedding", "add_bias_logits", "add_final_layer_norm")
BLOCK_NAMES = {
    "attention.qkv": "self_attn.{part}_proj",
    "attention.out": "self_attn.out_proj",
    "attention_norm": "self_attn_layer_norm",
    "cross.q": "encoder_attn.q_proj",
    "cross.kv": "encoder_attn.{part}_proj",
    "cross.out": "encoder_attn.out_proj",
    "cross_norm": "encoder_attn_layer_norm",
    "mlp.up": "fc1",
    "mlp.down": "fc2",
    "mlp_norm": "final_layer_norm",
}
NAMES = {
    "": "",
    "encoder_embed": "model.encoder.embed_tokens",
    "decoder_embed": "model.decoder.embed_tokens",
    "head": "lm_head",
} | {
    f"{side}.{{i}}.{ours}": f"model.{side}.layers.{{i}}.{theirs}"
    for side in ("encoder", "decoder")
    for ours, theirs in BLOCK_NAMES.items()
}


@dataclass(frozen=True, slots=True)
class MarianConfig:
    """The config of a Marian checkpoint."""

    vocab_size: int
    hidden: int
    encoder_layers: int
    encoder_heads: int
    encoder_intermediate: int
    decoder_layers: int
    decoder_heads: int
    decoder_intermediate: int
    max_positions: int
    activation: str
    scale: float  # factor on token embeddings
    shared: bool  # encoder and decoder share one token embedding
    tied: bool  # the head is the decoder's token embedding

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> MarianConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        for variant in VARIANTS:
            expect(config, variant, False)
        expect(config, "static_position_embeddings", True)
        expect(config, "activation_function", *ACTIVATIONS)
        vocab_size = positive(config, "vocab_size")
        expect(config, "decoder_vocab_size", None, vocab_size)  # one tokenizer for both
        hidden, encoder_heads = shared_by(config, "d_model", "encoder_attention_heads")
        hidden, decoder_heads = shared_by(config, "d_model", "decoder_attention_heads")
        return cls(
            vocab_size=vocab_size,
            hidden=hidden,
            encoder_layers=layer_count(config, "encoder_layers"),
            encoder_heads=encoder_heads,
            encoder_intermediate=positive(config, "encoder_ffn_dim"),
            decoder_layers=layer_count(config, "decoder_layers"),
            decoder_heads=decoder_heads,
            decoder_intermediate=positive(config, "decoder_ffn_dim"),
            max_positions=positive(config, "max_position_embeddings"),
            activation=config.get("activation_function", "gelu"),
            scale=hidden**0.5 if config.get("scale_embedding") else 1.0,
            shared=bool(config.get("share_encoder_decoder_embeddings", True)),
            tied=bool(config.get("tie_word_embeddings", True)),
        )

    def spec(self, kind: Literal["causal", "full", "cross"]) -> AttentionSpec:
        heads = self.encoder_heads if kind == "full" else self.decoder_heads
        dim = self.hidden // heads
        return AttentionSpec(heads, heads, dim, scale=dim**-0.5, kind=kind)


class EncoderBlock(nn.Module):
    def __init__(self, config: MarianConfig) -> None:
        super().__init__()
        c = config
        self.attention = SelfAttention(c.hidden, c.spec("full"), bias=True)
        self.attention_norm = LayerNorm(c.hidden, NORM_EPS)
        self.mlp = MLP(c.hidden, c.encoder_intermediate, ACTIVATIONS[c.activation], bias=True)
        self.mlp_norm = LayerNorm(c.hidden, NORM_EPS)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        _, x = self.attention_norm.add(x, self.attention(x, batch))
        return self.mlp_norm.add(x, self.mlp(x))[1]


class DecoderBlock(nn.Module):
    def __init__(self, config: MarianConfig, index: int) -> None:
        super().__init__()
        c, cross_index = config, config.decoder_layers + index
        self.attention = SelfAttention(c.hidden, c.spec("causal"), index, bias=True)
        self.attention_norm = LayerNorm(c.hidden, NORM_EPS)
        self.cross = CrossAttention(c.hidden, c.spec("cross"), cross_index, bias=True)
        self.cross_norm = LayerNorm(c.hidden, NORM_EPS)
        self.mlp = MLP(c.hidden, c.decoder_intermediate, ACTIVATIONS[c.activation], bias=True)
        self.mlp_norm = LayerNorm(c.hidden, NORM_EPS)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        _, x = self.attention_norm.add(x, self.attention(x, batch))
        _, x = self.cross_norm.add(x, self.cross(x, batch))
        return self.mlp_norm.add(x, self.mlp(x))[1]


class Marian(nn.Module):
    @staticmethod
    def read_config(config: dict[str, Any]) -> MarianConfig:
        return MarianConfig.from_hf(config)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = self.read_config(config)
        self.encoder_embed = TokenEmbedding(c.vocab_size, c.hidden, divisible=True)
        self.decoder_embed = self.encoder_embed
        if not c.shared:
            self.decoder_embed = TokenEmbedding(c.vocab_size, c.hidden, divisible=True)
        self.position = Sinusoids(max_positions, c.hidden, dtype)
        self.encoder = nn.ModuleList(EncoderBlock(c) for _ in range(c.encoder_layers))
        self.decoder = nn.ModuleList(DecoderBlock(c, i) for i in range(c.decoder_layers))
        self.head = LMHead(c.vocab_size, c.hidden, tied_to=self.decoder_embed if c.tied else None)
        self.final_logits_bias = nn.Parameter(torch.empty(1, c.vocab_size))

    def encode(self, batch: ForwardBatch) -> torch.Tensor:
        x = self.encoder_embed(batch.input_ids) * self.config.scale + self.position(batch.positions)
        for block in self.encoder:
            x = block(x, batch)
        for layer in self.modules():
            if isinstance(layer, CrossAttention):
                layer.store(x, batch)
        return x

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x = self.decoder_embed(batch.input_ids) * self.config.scale + self.position(batch.positions)
        for block in self.decoder:
            x = block(x, batch)
        return x

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.add(self.head(hidden, out).float(), self.final_logits_bias, out=out)

    def weight_map(self) -> WeightMap:
        head = ("lm_head.weight",) if self.config.tied else ()
        source, answer = (f"model.{side}.embed_tokens" for side in ("encoder", "decoder"))
        names, aliases = NAMES, {f"{answer}.weight": head}
        if self.config.shared:
            names = NAMES | {"encoder_embed": "model.shared"}
            aliases = {"model.shared.weight": (f"{source}.weight", f"{answer}.weight", *head)}
        targets = targets_by_module(self, names)
        return WeightMap(targets, aliases=aliases, ignored=("embed_positions.weight",))
