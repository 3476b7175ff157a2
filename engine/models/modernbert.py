"""ModernBERT (arXiv 2412.13663): pre-norm, rotary positions, GeGLU; two of three layers are local.

A local layer sees `local_attention // 2` tokens to each side, and has its own rotary base.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec
from engine.checkpoint.sentence_modules import PoolingMode
from engine.checkpoint.weight_map import WeightMap, targets_by_module
from engine.errors import ConfigError
from engine.layers.attention import RotaryAttention
from engine.layers.classification_head import ClassificationHead
from engine.layers.embedding import TokenEmbedding
from engine.layers.mlp import ACTIVATIONS, GATED_OF_ENCODERS, MLP
from engine.layers.norm import Join, LayerNorm
from engine.layers.rotary import (
    LAYER_KINDS,
    RopeScaling,
    RotaryEmbedding,
    expect_one_table,
    expect_truncated,
    parameters_by_kind,
    rope_theta,
)
from engine.models.base import (
    expect,
    label_count,
    layer_count,
    layer_windows,
    positive,
    positive_float,
    required,
    shared_by,
)
from engine.ops.norm import Tensors

NAMES = {
    "embed": "embeddings.tok_embeddings",
    "embed_norm": "embeddings.norm",
    "blocks.{i}.attention_norm": "layers.{i}.attn_norm",
    "blocks.{i}.attention.qkv": "layers.{i}.attn.Wqkv",
    "blocks.{i}.attention.out": "layers.{i}.attn.Wo",
    "blocks.{i}.mlp_norm": "layers.{i}.mlp_norm",
    "blocks.{i}.mlp.up": "layers.{i}.mlp.Wi",
    "blocks.{i}.mlp.down": "layers.{i}.mlp.Wo",
    "norm": "final_norm",
}
HEADS = ("head.", "decoder.")
CLASSIFIER = {"head.dense": "head.dense", "head.norm": "head.norm", "head.out": "classifier"}
POOLINGS: tuple[PoolingMode, ...] = ("cls", "mean")
# Kind of layer -> (older key of its rotary base, default).
THETA = {
    "full_attention": ("global_rope_theta", 160_000.0),
    "sliding_attention": ("local_rope_theta", 10_000.0),
}


@dataclass(frozen=True, slots=True)
class Rope:
    """The rotary parameters of one kind of layer."""

    theta: float
    scaling: RopeScaling

    @classmethod
    def from_hf(cls, config: dict[str, Any], kind: str) -> Rope:
        """Read them from either spelling. Raises ConfigError for unsupported settings."""
        key, default = THETA[kind]
        given = parameters_by_kind(config)
        own = config.get("rope_scaling") if given is None else given.get(kind)
        expect_truncated(own)
        theta = default
        if key in config:
            required(config, key)  # transformers does not replace null by the default
            theta = config[key]
        rope = {
            "rope_theta": theta,
            "rope_parameters": own,
            "max_position_embeddings": config.get("max_position_embeddings"),
        }
        scaling = RopeScaling.from_hf(rope)
        expect_one_table(scaling)
        return cls(rope_theta(rope), scaling)


@dataclass(frozen=True, slots=True)
class ModernBertConfig:
    """The config of a ModernBERT checkpoint."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    max_positions: int
    norm_eps: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    activation: str
    windows: tuple[int | None, ...]  # one per layer, as in AttentionSpec; None: it sees all tokens
    rope: dict[str, Rope]  # by kind of layer

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> ModernBertConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        expect(config, "hidden_activation", *GATED_OF_ENCODERS)
        hidden, heads = shared_by(config, "hidden_size", "num_attention_heads")
        expect(config, "head_dim", None, hidden // heads)
        if hidden // heads % 2:
            raise ConfigError(
                f"config.json has {heads} heads of {hidden // heads} dimensions; rotary embedding "
                "needs an even number."
            )
        reach = positive(config, "local_attention", 128) // 2
        expect(config, "sliding_window", reach)  # transformers prefers it to local_attention
        period = positive(config, "global_attn_every_n_layers", 3)
        return cls(
            vocab_size=positive(config, "vocab_size"),
            hidden=hidden,
            intermediate=positive(config, "intermediate_size"),
            layers=layer_count(config),
            heads=heads,
            max_positions=positive(config, "max_position_embeddings"),
            norm_eps=positive_float(config, "norm_eps"),
            norm_bias=bool(config.get("norm_bias", False)),
            attention_bias=bool(config.get("attention_bias", False)),
            mlp_bias=bool(config.get("mlp_bias", False)),
            activation=config.get("hidden_activation", "gelu"),
            windows=layer_windows(config, reach + 1, lambda i: i % period != 0),
            rope={kind: Rope.from_hf(config, kind) for kind in LAYER_KINDS},
        )


class ModernBertBlock(nn.Module):
    def __init__(self, config: ModernBertConfig, index: int) -> None:
        super().__init__()
        c, dim = config, config.hidden // config.heads
        spec = AttentionSpec(
            c.heads, c.heads, dim, scale=dim**-0.5, kind="full", window=c.windows[index]
        )
        # The embedding's norm precedes the first layer.
        self.attention_norm = Join() if index == 0 else modernbert_norm(c)
        self.attention = RotaryAttention(
            c.hidden, spec, qkv_bias=c.attention_bias, out_bias=c.attention_bias
        )
        self.mlp_norm = modernbert_norm(c)
        self.mlp = MLP(
            c.hidden,
            c.intermediate,
            GATED_OF_ENCODERS[c.activation],
            parts=("gate", "up"),
            bias=c.mlp_bias,
        )

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


def modernbert_norm(config: ModernBertConfig) -> LayerNorm:
    return LayerNorm(config.hidden, config.norm_eps, bias=config.norm_bias)


class ModernBert(nn.Module):
    @staticmethod
    def read_config(config: dict[str, Any]) -> ModernBertConfig:
        return ModernBertConfig.from_hf(config)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = self.read_config(config)
        self.embed = TokenEmbedding(c.vocab_size, c.hidden, divisible=True)
        self.embed_norm = modernbert_norm(c)
        self.rotary, self.local_rotary = (
            RotaryEmbedding(
                c.hidden // c.heads, c.rope[kind].theta, c.rope[kind].scaling, max_positions, dtype
            )
            for kind in LAYER_KINDS
        )
        self.blocks = nn.ModuleList(ModernBertBlock(c, i) for i in range(c.layers))
        self.norm = modernbert_norm(c)

    def encode(self, batch: ForwardBatch) -> torch.Tensor:
        x, delta = self.embed_norm(self.embed(batch.input_ids)), None
        everywhere, nearby = self.rotary(batch.positions), self.local_rotary(batch.positions)
        for block, window in zip(self.blocks, self.config.windows, strict=True):
            angles = everywhere if window is None else nearby
            x, delta = block(x, delta, *angles, batch)
        return self.norm.add(x, delta)[1]

    def weight_map(self) -> WeightMap:
        return WeightMap(
            targets_by_module(self, NAMES), prefixes=("model.", ""), ignored_prefixes=HEADS
        )


class ModernBertClassifier(ModernBert):
    """ModernBERT with a head that reads the first token, or the mean."""

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        expect(config, "classifier_pooling", *POOLINGS)
        expect(config, "classifier_activation", *ACTIVATIONS)
        self.head_pooling: PoolingMode = config.get("classifier_pooling", "cls")
        self.passed_over = None
        self.num_labels = label_count(config)
        self.head = ClassificationHead(
            self.config.hidden,
            self.num_labels,
            ACTIVATIONS[config.get("classifier_activation", "gelu")],
            bias=bool(config.get("classifier_bias", False)),
            norm=modernbert_norm(self.config),
        )

    def classify(self, pooled: torch.Tensor) -> torch.Tensor:
        return self.head(pooled)

    def weight_map(self) -> WeightMap:
        return WeightMap(targets_by_module(self, NAMES | CLASSIFIER), prefixes=("model.", ""))
