"""Gemma 3 (arXiv 2503.19786): Gemma 2 with query and key norms instead of softcaps.

Five windowed layers precede each global layer; each kind of layer has its own rotary base. In all
layers the tokens of an image see each other both ways.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from engine.attention.batch import ForwardBatch
from engine.checkpoint.weight_map import Names, WeightMap, targets_by_module
from engine.layers.rotary import (
    RopeScaling,
    RotaryEmbedding,
    expect_truncated,
    parameters_by_kind,
    rope_theta,
)
from engine.models.base import expect, layer_windows, nullable, positive, positive_float, required
from engine.models.gemma import gemma_facts, gemma_spelling
from engine.models.gemma2 import NAMES_GEMMA2, Gemma2, Gemma2Config
from engine.models.multimodal import (
    TEXT,
    TOWER,
    nested_config,
    nested_weight_map,
    other_spellings,
    spellings,
)
from engine.models.vision.block import under
from engine.models.vision.gemma3 import Gemma3Vision, Gemma3VisionConfig, with_projection

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
    vision: Gemma3VisionConfig | None  # None: text only


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
        vision = None
        if nested and config.get("vision_config") is not None:
            vision = Gemma3VisionConfig.from_hf(config, positive(text, "hidden_size"))
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
            vision=vision,
            sees_whole_images=vision is not None,
        )

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        c = self.config
        self.local_rotary = RotaryEmbedding(
            c.head_dim, c.local_theta, c.local_scaling, max_positions, dtype
        )

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x, delta, post = self.inputs(batch), None, None
        everywhere, nearby = self.rotary(batch.positions), self.local_rotary(batch.positions)
        for block, window in zip(self.blocks, self.config.windows, strict=True):
            angles = everywhere if window is None else nearby
            x, delta, post = block(x, delta, post, *angles, batch)
        return self.norm.add(x, delta, post)[1]

    def inputs(self, batch: ForwardBatch) -> torch.Tensor:
        """Return the token embeddings [T, hidden], with those of images in their places."""
        x: torch.Tensor = self.embed(batch.input_ids)
        return x if batch.seen is None else batch.seen.place(x)

    def weight_map(self) -> WeightMap:
        targets = {
            name.removeprefix("model."): target
            for name, target in targets_by_module(self, NAMES_GEMMA2).items()
        }
        aliases = {"embed_tokens.weight": ("lm_head.weight",)} if self.config.tied else {}
        if self.config.nested:
            return nested_weight_map(targets, aliases)
        return WeightMap(targets, prefixes=("model.", ""), aliases=aliases)


class SeeingGemma3(Gemma3):
    names: ClassVar[Names] = under(NAMES_GEMMA2, "", TEXT) | under(
        Gemma3Vision.names, "vision.", ""
    )

    @staticmethod
    def read_config(config: dict[str, Any]) -> Gemma3Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        required(config, "text_config")
        required(config, "vision_config")
        return Gemma3.read_config(config)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        assert self.config.vision is not None
        self.vision = Gemma3Vision(self.config.vision, dtype=dtype)

    @property
    def image_tokens(self) -> int:
        vision = self.vision.config
        return (vision.tower.side // vision.pool) ** 2

    def weight_map(self) -> WeightMap:
        targets = with_projection(targets_by_module(self, self.names))
        unused = TOWER + "head."
        return WeightMap(
            targets,
            aliases=spellings(targets, tied=self.config.tied),
            ignored=("embeddings.position_ids", "rotary_emb.inv_freq"),
            ignored_prefixes=(unused, *other_spellings(unused)),
        )
