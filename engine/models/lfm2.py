"""LFM2 (arXiv 2511.23404): gated short convolutions, and attention in some layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.errors import ConfigError
from engine.layers.experts import Experts
from engine.layers.linear import Linear
from engine.layers.mlp import GATED, MLP
from engine.layers.recurrent import CausalConv
from engine.layers.state import LayerState, StatePart
from engine.models.base import (
    conv_width,
    layer_count,
    layer_kinds,
    nullable,
    positive,
    positive_float,
    required,
    with_attention,
)
from engine.models.hybrid import ATTENDS, HybridBlock
from engine.models.llama import NAMES, Llama, LlamaConfig

CONVOLVES = "conv"
THETA = 1_000_000.0  # if config.json has no rope_theta


@dataclass(frozen=True, slots=True, kw_only=True)
class Lfm2Config(LlamaConfig):
    kinds: tuple[str, ...]  # ATTENDS or CONVOLVES, one per layer
    conv_width: int
    conv_bias: bool


class ShortConv(nn.Module):
    """out(c * conv(b * x)) of [b, c, x] = inputs(x). It is number `index` of these layers."""

    def __init__(self, config: Lfm2Config, index: int) -> None:
        super().__init__()
        hidden, width, bias = config.hidden, config.conv_width, config.conv_bias
        # Ranks divide each third in units of a channel.
        sizes = dict.fromkeys(("b", "c", "x"), hidden)
        self.inputs = Linear(hidden, sizes, bias=bias, output_units=sizes)
        self.state = LayerState(index, StatePart((width - 1, hidden), dim=1))
        self.conv = CausalConv({"": hidden}, width, units={"": hidden}, bias=bias)
        self.out = Linear(hidden, hidden, bias=bias, input_units=hidden)

    def forward(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """[T, hidden] -> [T, hidden]."""
        (tails,), runs = self.state(batch)
        b, c, x = self.inputs(x).chunk(3, dim=-1)
        return self.out(c * self.conv(b * x, tails, runs))


def lfm2_mlp(config: Lfm2Config, index: int) -> nn.Module:
    """Return the feed-forward network of layer `index`, or its mixture of experts."""
    c = config
    if c.experts is None or index in c.dense_layers:
        return MLP(c.hidden, c.intermediate, GATED["silu"], parts=("w1", "w3"))
    return Experts(c.hidden, c.experts, "silu")


class Lfm2Block(HybridBlock):
    def __init__(self, config: Lfm2Config, index: int) -> None:
        c = config
        super().__init__(c, c.kinds, index, partial(ShortConv, c), lfm2_mlp(c, index))


class Lfm2(Llama):
    block = Lfm2Block
    names: ClassVar[Mapping[str, str]] = NAMES | {
        "blocks.{i}.attention_norm": "model.layers.{i}.operator_norm",
        "blocks.{i}.attention.q_norm": "model.layers.{i}.self_attn.q_layernorm",
        "blocks.{i}.attention.k_norm": "model.layers.{i}.self_attn.k_layernorm",
        "blocks.{i}.attention.out": "model.layers.{i}.self_attn.out_proj",
        "blocks.{i}.recurrent.inputs": "model.layers.{i}.conv.in_proj",
        "blocks.{i}.recurrent.conv": "model.layers.{i}.conv.conv",
        "blocks.{i}.recurrent.out": "model.layers.{i}.conv.out_proj",
        "blocks.{i}.mlp_norm": "model.layers.{i}.ffn_norm",
        "blocks.{i}.mlp.up": "model.layers.{i}.feed_forward.{part}",
        "blocks.{i}.mlp.down": "model.layers.{i}.feed_forward.w2",
        "norm": "model.embedding_norm",
    }

    @staticmethod
    def read_config(config: dict[str, Any]) -> Lfm2Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant.

        Published checkpoints have other names for some keys than those that transformers saves.
        """
        own = {
            "rms_norm_eps": required(config, "norm_eps"),
            "intermediate_size": _intermediate(config),
            "tie_word_embeddings": config.get(
                "tie_embedding", config.get("tie_word_embeddings", True)
            ),
        }
        return Lfm2Config.from_hf(
            {"rope_theta": THETA} | config | own,
            kinds=_kinds(config),
            conv_width=conv_width(config, "conv_L_cache"),
            conv_bias=bool(config.get("conv_bias", False)),
            qk_norm=True,
        )


def _kinds(config: dict[str, Any]) -> tuple[str, ...]:
    """Return the kind of each layer. Raises ConfigError if a list is malformed, or none attends."""
    layers = layer_count(config)
    attending = config.get("full_attn_idxs")
    if attending is None:
        attending = list(range(layers))
    if not isinstance(attending, list) or any(type(index) is not int for index in attending):
        raise ConfigError(
            f"config.json has full_attn_idxs = {attending!r:.99}; it must be a list of the numbers "
            "of layers."
        )
    kinds = [ATTENDS if index in attending else CONVOLVES for index in range(layers)]
    return with_attention(layer_kinds(config, kinds, (ATTENDS, CONVOLVES)), ATTENDS)


def _intermediate(config: dict[str, Any]) -> int:
    """Return the width of the MLP, which config.json may give before it is adjusted."""
    config = {"block_ffn_dim_multiplier": 1.0} | config
    size = positive(config, "block_ff_dim", config.get("intermediate_size"))
    if not config.get("block_auto_adjust_ff_dim", True):
        return size
    size = 2 * size // 3
    factor = nullable(config, "block_ffn_dim_multiplier", positive_float)
    if factor is None:
        return size
    multiple = positive(config, "block_multiple_of", 256)
    return multiple * -(-int(factor * size) // multiple)
