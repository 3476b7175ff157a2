"""T5 (arXiv 1910.10683), T5 1.1 and Flan-T5: relative positions, RMSNorm, unscaled attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec, RelativeBias
from engine.checkpoint.weight_map import WeightMap, targets_by_module
from engine.errors import ConfigError
from engine.layers.attention import CrossAttention, SelfAttention
from engine.layers.embedding import LMHead, TokenEmbedding
from engine.layers.mlp import ACTIVATIONS, MLP, Activation
from engine.layers.norm import RMSNorm
from engine.models.base import expect, layer_count, positive, positive_float
from engine.ops.gated import gelu_tanh_mul, silu_mul
from engine.ops.norm import Tensors

# feed_forward_proj -> (dense_act_fn, names of the input linears, activation).
FEED_FORWARDS: dict[str, tuple[str, Sequence[str], Activation]] = {
    "relu": ("relu", ["wi"], ACTIVATIONS["relu"]),
    "gated-gelu": ("gelu_new", ["wi_0", "wi_1"], gelu_tanh_mul),
    "gated-silu": ("silu", ["wi_0", "wi_1"], silu_mul),
}
ENCODER, DECODER = "encoder.block.{i}.layer", "decoder.block.{i}.layer"
TABLE = "block.0.layer.0.SelfAttention.relative_attention_bias"
NAMES = {
    "embed": "shared",
    "encoder_table": f"encoder.{TABLE}",
    "encoder.{i}.attention_norm": f"{ENCODER}.0.layer_norm",
    "encoder.{i}.attention.qkv": ENCODER + ".0.SelfAttention.{part}",
    "encoder.{i}.attention.out": f"{ENCODER}.0.SelfAttention.o",
    "encoder.{i}.mlp_norm": f"{ENCODER}.1.layer_norm",
    "encoder.{i}.mlp.up": ENCODER + ".1.DenseReluDense.{part}",
    "encoder.{i}.mlp.down": f"{ENCODER}.1.DenseReluDense.wo",
    "encoder_norm": "encoder.final_layer_norm",
    "decoder_table": f"decoder.{TABLE}",
    "decoder.{i}.attention_norm": f"{DECODER}.0.layer_norm",
    "decoder.{i}.attention.qkv": DECODER + ".0.SelfAttention.{part}",
    "decoder.{i}.attention.out": f"{DECODER}.0.SelfAttention.o",
    "decoder.{i}.cross_norm": f"{DECODER}.1.layer_norm",
    "decoder.{i}.cross.q": f"{DECODER}.1.EncDecAttention.q",
    "decoder.{i}.cross.kv": DECODER + ".1.EncDecAttention.{part}",
    "decoder.{i}.cross.out": f"{DECODER}.1.EncDecAttention.o",
    "decoder.{i}.mlp_norm": f"{DECODER}.2.layer_norm",
    "decoder.{i}.mlp.up": DECODER + ".2.DenseReluDense.{part}",
    "decoder.{i}.mlp.down": f"{DECODER}.2.DenseReluDense.wo",
    "norm": "decoder.final_layer_norm",
    "head": "lm_head",
}
COPIES = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")  # copies of shared
UNUSED = "1.EncDecAttention.relative_attention_bias.weight"  # in T5 1.0 files


@dataclass(frozen=True, slots=True)
class T5Config:
    """The config of a T5 checkpoint."""

    vocab_size: int
    hidden: int
    heads: int
    head_dim: int
    intermediate: int
    encoder_layers: int
    decoder_layers: int
    buckets: int
    max_distance: int
    norm_eps: float
    feed_forward: str
    tied: bool
    scaled: bool  # hidden states are scaled before the head
    max_positions: None = None  # distances are unbounded; n_positions is the training length

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> T5Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        feed_forward = config.get("feed_forward_proj", "relu")
        expect(config, "feed_forward_proj", *FEED_FORWARDS)
        expect(config, "dense_act_fn", FEED_FORWARDS[feed_forward][0])
        expect(config, "tie_encoder_decoder", False)
        layers, tied = layer_count(config, "num_layers"), config.get("tie_word_embeddings", True)
        buckets = positive(config, "relative_attention_num_buckets", 32)
        max_distance = positive(config, "relative_attention_max_distance", 128)
        if buckets < 4 or max_distance <= buckets // 2:
            raise ConfigError(
                f"config.json has relative_attention_num_buckets = {buckets} for a maximum "
                f"distance of {max_distance}; the buckets must be at least 4, and the distance "
                "above half their number."
            )
        return cls(
            vocab_size=positive(config, "vocab_size"),
            hidden=positive(config, "d_model"),
            heads=positive(config, "num_heads"),
            head_dim=positive(config, "d_kv"),
            intermediate=positive(config, "d_ff"),
            encoder_layers=layers,
            decoder_layers=layer_count(config, "num_decoder_layers", layers),
            buckets=buckets,
            max_distance=max_distance,
            norm_eps=positive_float(config, "layer_norm_epsilon"),
            feed_forward=feed_forward,
            tied=bool(tied),
            scaled=bool(config.get("scale_decoder_outputs", tied)),
        )

    @property
    def own_head(self) -> bool:
        """Whether the head has its own weights instead of the token embedding's.

        T5 1.1 unties the head and does not scale. Newer transformers save T5 1.1 as tied, but
        still store a head unless it equals the embedding.
        """
        return not (self.tied and self.scaled)

    def spec(self, kind: Literal["causal", "full", "cross"]) -> AttentionSpec:
        """Return the spec of all layers of a kind; only self-attention has relative positions."""
        both = kind == "full"
        relative = None if kind == "cross" else RelativeBias(self.buckets, self.max_distance, both)
        heads = self.heads, self.heads, self.head_dim
        return AttentionSpec(*heads, scale=1.0, kind=kind, relative=relative)


def t5_mlp(config: T5Config) -> MLP:
    _, parts, activation = FEED_FORWARDS[config.feed_forward]
    return MLP(config.hidden, config.intermediate, activation, parts=parts)


class T5EncoderBlock(nn.Module):
    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = SelfAttention(config.hidden, config.spec("full"))
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = t5_mlp(config)

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, batch: ForwardBatch, table: torch.Tensor
    ) -> Tensors:
        """Return the residual stream [T, hidden] and the MLP's output, not yet added to it.

        `x` and `delta` are these two values of the previous block. `table` is the encoder's
        relative bias [buckets, heads].
        """
        x, normed = self.attention_norm.add(x, delta)
        x, normed = self.mlp_norm.add(x, self.attention(normed, batch, table))
        return x, self.mlp(normed)


class T5DecoderBlock(nn.Module):
    def __init__(self, config: T5Config, index: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.hidden, config.norm_eps)
        self.attention = SelfAttention(config.hidden, config.spec("causal"), index)
        self.cross_norm = RMSNorm(config.hidden, config.norm_eps)
        cross_index = config.decoder_layers + index
        self.cross = CrossAttention(config.hidden, config.spec("cross"), cross_index)
        self.mlp_norm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = t5_mlp(config)

    def forward(
        self, x: torch.Tensor, delta: torch.Tensor | None, batch: ForwardBatch, table: torch.Tensor
    ) -> Tensors:
        """Like T5EncoderBlock.forward, with the decoder's relative bias."""
        x, normed = self.attention_norm.add(x, delta)
        x, normed = self.cross_norm.add(x, self.attention(normed, batch, table))
        x, normed = self.mlp_norm.add(x, self.cross(normed, batch))
        return x, self.mlp(normed)


class T5(nn.Module):
    @staticmethod
    def read_config(config: dict[str, Any]) -> T5Config:
        return T5Config.from_hf(config)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = self.read_config(config)
        self.embed = TokenEmbedding(c.vocab_size, c.hidden, divisible=True)
        # Relative bias [buckets, heads] of all layers; checkpoints store it in the first layer.
        self.encoder_table = TokenEmbedding(c.buckets, c.heads, column_units=c.heads)
        self.encoder = nn.ModuleList(T5EncoderBlock(c) for _ in range(c.encoder_layers))
        self.encoder_norm = RMSNorm(c.hidden, c.norm_eps)
        self.decoder_table = TokenEmbedding(c.buckets, c.heads, column_units=c.heads)
        self.decoder = nn.ModuleList(T5DecoderBlock(c, i) for i in range(c.decoder_layers))
        self.norm = RMSNorm(c.hidden, c.norm_eps)
        self.head = LMHead(c.vocab_size, c.hidden, tied_to=None if c.own_head else self.embed)

    def encode(self, batch: ForwardBatch) -> torch.Tensor:
        x, delta = self.embed(batch.input_ids), None
        for block in self.encoder:
            x, delta = block(x, delta, batch, self.encoder_table.weight)
        x = self.encoder_norm.add(x, delta)[1]
        for layer in self.modules():
            if isinstance(layer, CrossAttention):
                layer.store(x, batch)
        return x

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x, delta = self.embed(batch.input_ids), None
        for block in self.decoder:
            x, delta = block(x, delta, batch, self.decoder_table.weight)
        return self.norm.add(x, delta)[1]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        if self.config.scaled:
            hidden = hidden * self.config.hidden**-0.5
        return self.head(hidden, out)

    def weight_map(self) -> WeightMap:
        embed, head = ("shared.weight", *COPIES), "lm_head.weight"
        aliases: dict[str, Sequence[str]] = {embed[0]: (*COPIES, head)}
        if self.config.own_head:
            aliases = {embed[0]: COPIES, head: embed if self.config.tied else ()}
        return WeightMap(targets_by_module(self, NAMES), aliases=aliases, ignored=(UNUSED,))
