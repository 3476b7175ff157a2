"""Qwen3.5, dense: Qwen3-Next with other input projections and a plain MLP.

`Qwen35` is the language model. It is also read from a multimodal checkpoint. `SeeingQwen35` has the
tower of Qwen3-VL without DeepStack. Its rotary embedding has three positions a token, for time,
height and width, whose frequencies are interleaved. In a text all three are equal, so it is the
plain one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from engine.checkpoint.weight_map import Names, WeightMap
from engine.layers.rotary import RopeScaling, rope_parameters
from engine.layers.rotary_sections import RotarySections
from engine.models.base import attention_heads, required
from engine.models.multimodal import expect_width, nested_config
from engine.models.qwen3_next import (
    DELTA,
    GATED_NAMES,
    ROTARY_SHARE,
    GatedLlama,
    Qwen3NextConfig,
)
from engine.models.vision.block import under
from engine.models.vision.qwen3 import Qwen3Vision, Qwen3VisionConfig

STACKED = dict.fromkeys("qkv", DELTA + "in_proj_qkv")
PREFIXES = ("model.language_model.", "model.", "language_model.model.", "language_model.", "")
HEAD_PREFIXES = ("mtp.", "model.mtp.")
SECTIONS = (11, 11, 10)  # frequencies of time, height and width


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the language model, which may be inside a multimodal one.

    The embedding is tied if either of the two says so: transformers saves that at the top only.
    """
    if "text_config" not in config:
        return config
    text = nested_config(config)
    tied = bool(config.get("tie_word_embeddings") or text.get("tie_word_embeddings"))
    return text | {"tie_word_embeddings": tied}


@dataclass(frozen=True, slots=True, kw_only=True)
class SeeingQwen35Config(Qwen3NextConfig):
    vision: Qwen3VisionConfig


def seeing_facts(config: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of SeeingQwen35Config that a text model has not.

    Raises ConfigError for a missing key or an unsupported variant.
    """
    required(config, "vision_config")
    text = {"partial_rotary_factor": ROTARY_SHARE} | text_config(config)
    rotated = RopeScaling.from_hf(text, partial=True).width(attention_heads(text)[2])
    parameters, frequencies = rope_parameters(text), rotated // 2
    vision = Qwen3VisionConfig.read(config, deep_layers=())
    expect_width(vision.out_hidden, text["hidden_size"])
    return {
        "sections": RotarySections.from_hf(parameters, SECTIONS, frequencies, interleaved=True),
        "vision": vision,
    }


class Qwen35(GatedLlama):
    names: ClassVar[Names] = GATED_NAMES | {
        "blocks.{i}.recurrent.inputs": STACKED | {"z": DELTA + "in_proj_z"},
        "blocks.{i}.recurrent.rates": DELTA + "in_proj_{part}",
    }
    ignored_prefixes: ClassVar[Sequence[str]] = (*HEAD_PREFIXES, "model.visual.", "visual.")

    @staticmethod
    def read_config(config: dict[str, Any]) -> Qwen3NextConfig:
        return Qwen3NextConfig.from_hf(text_config(config))

    def weight_map(self) -> WeightMap:
        """Return the WeightMap. A language model keeps the prefix that it had in a larger one."""
        plain = super().weight_map()
        return replace(
            plain,
            targets={name.removeprefix("model."): each for name, each in plain.targets.items()},
            prefixes=PREFIXES,
            aliases={name.removeprefix("model."): each for name, each in plain.aliases.items()},
        )


class SeeingQwen35(Qwen35):
    names: ClassVar[Names] = dict(Qwen35.names) | under(
        Qwen3Vision.names, "vision.", "model.visual."
    )
    ignored_prefixes: ClassVar[Sequence[str]] = HEAD_PREFIXES
    config: SeeingQwen35Config

    @staticmethod
    def read_config(config: dict[str, Any]) -> SeeingQwen35Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        return SeeingQwen35Config.from_hf(text_config(config), **seeing_facts(config))

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        self.vision = Qwen3Vision(self.config.vision, dtype=dtype)
