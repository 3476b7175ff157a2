"""Gemma 3, text only (arXiv 2503.19786): Gemma 2 with query and key norms instead of softcaps.

Five windowed layers precede each global layer; each kind of layer has its own rotary base.
Multimodal checkpoints are served as the language model that they contain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.batch import ForwardBatch
from engine.checkpoint.weight_map import WeightMap, targets_by_module
from engine.layers.rotary import (
    RopeScaling,
    RotaryEmbedding,
    expect_truncated,
    parameters_by_kind,
    rope_theta,
)
from engine.models.base import expect, layer_windows, nullable, positive, positive_float
from engine.models.gemma import gemma_facts, gemma_spelling
from engine.models.gemma2 import NAMES_GEMMA2, Gemma2, Gemma2Config
from engine.models.multimodal import nested_config, nested_weight_map

# The defaults of transformers: a nested text_config omits values that equal them.
TEXT_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
THETA = {
    "full_attention": ("rope_theta", 1e6),
    "sliding_attention": ("rope_local_base_freq", 1e4),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(Gemma2Config):
    """The config of a Gemma 3 checkpoint.

    `rope_theta` and `rope_scaling` apply to global layers, the local_ fields to windowed ones.
    """

    local_theta: float
    local_scaling: RopeScaling
    nested: bool  # inside a multimodal checkpoint


def _text_config(config: dict[str, Any]) -> dict[str, Any]:
    text = nested_config(config)
    tied = config.get("tie_word_embeddings", True)
    expect(text, "tie_word_embeddings", tied)
    return TEXT_DEFAULTS | text | {"tie_word_embeddings": tied}


def _rope(config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the config with the rotary parameters of one layer kind, from either spelling."""
    key, default = THETA[kind]
    own: dict[str, Any] = {"rope_theta": config.get(key) or default}
    given = parameters_by_kind(config)
    expect_truncated(config.get("rope_scaling") if given is None else given.get(kind))
    if given is None:
        if kind == "sliding_attention":
            own["rope_scaling"] = None  # it applies to global layers only
        return config | own
    return config | own | {"rope_parameters": given.get(kind)}


class Gemma3(Gemma2):
    config: Gemma3Config

    @staticmethod
    def read_config(config: dict[str, Any]) -> Gemma3Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        nested = "text_config" in config
        text = gemma_spelling(_text_config(config) if nested else config)
        expect(text, "attn_logit_softcapping", None)
        final_cap = {"final_logit_softcapping": None} | text
        period = positive(text, "sliding_window_pattern", 6)
        local = _rope(text, "sliding_attention")
        return Gemma3Config.from_hf(
            _rope(text, "full_attention"),
            **gemma_facts(text),
            windows=layer_windows(
                text, nullable(text, "sliding_window", positive), lambda i: (i + 1) % period != 0
            ),
            qk_norm=True,
            scale=positive_float(text, "query_pre_attn_scalar") ** -0.5,
            attention_softcap=None,
            final_softcap=nullable(final_cap, "final_logit_softcapping", positive_float),
            local_theta=rope_theta(local),
            local_scaling=RopeScaling.from_hf(local),
            nested=nested,
        )

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        c = self.config
        self.local_rotary = RotaryEmbedding(
            c.head_dim, c.local_theta, c.local_scaling, max_positions, dtype
        )

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x, delta, post = self.embed(batch.input_ids), None, None
        everywhere, nearby = self.rotary(batch.positions), self.local_rotary(batch.positions)
        for block, window in zip(self.blocks, self.config.windows, strict=True):
            angles = everywhere if window is None else nearby
            x, delta, post = block(x, delta, post, *angles, batch)
        return self.norm.add(x, delta, post)[1]

    def weight_map(self) -> WeightMap:
        targets = {
            name.removeprefix("model."): target
            for name, target in targets_by_module(self, NAMES_GEMMA2).items()
        }
        aliases = {"embed_tokens.weight": ("lm_head.weight",)} if self.config.tied else {}
        if self.config.nested:
            return nested_weight_map(targets, aliases)
        return WeightMap(targets, prefixes=("model.", ""), aliases=aliases)
