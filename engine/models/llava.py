"""LLaVA-NeXT and LLaVA-OneVision (arXiv 2408.03326): Llama, Mistral or Qwen2 that sees tiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import torch

from engine.checkpoint.weight_map import Names, WeightMap, targets_by_module
from engine.models.base import expect
from engine.models.llama import NAMES, Llama, LlamaConfig
from engine.models.mistral import Mistral
from engine.models.multimodal import (
    LLAMA_DEFAULTS,
    TEXT,
    TOWER,
    nested_config,
    other_spellings,
    spellings,
)
from engine.models.qwen2 import Qwen2
from engine.models.vision.block import under
from engine.models.vision.llava import LlavaVision, LlavaVisionConfig

READERS: Mapping[str, Callable[[dict[str, Any]], LlamaConfig]] = {
    "llama": Llama.read_config,
    "mistral": Mistral.read_config,
    "qwen2": Qwen2.read_config,
}
# The defaults of transformers: a nested text_config omits values that equal them.
TEXT_DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "llama": LLAMA_DEFAULTS,
    "mistral": {
        **LLAMA_DEFAULTS,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": {
        **LLAMA_DEFAULTS,
        "vocab_size": 151936,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LlavaConfig(LlamaConfig):
    vision: LlavaVisionConfig

    @classmethod
    def of(cls, text: LlamaConfig, vision: LlavaVisionConfig) -> Self:
        values = {each.name: getattr(text, each.name) for each in fields(text)}
        return cls(**values, vision=vision)


def read_text(config: dict[str, Any], default: str) -> LlamaConfig:
    """Read the language model's config, of the model type `default` if it does not say.

    Raises ConfigError for a missing key or an unsupported variant.
    """
    text = nested_config(config)
    expect(text, "model_type", *READERS)
    kind = text.get("model_type", default)
    tied = bool(config.get("tie_word_embeddings", False))
    return READERS[kind]({**TEXT_DEFAULTS[kind], **text, "tie_word_embeddings": tied})


class LlavaNext(Llama):
    names: ClassVar[Names] = under(NAMES, "", TEXT) | under(LlavaVision.clip_names, "vision.", "")
    config: LlavaConfig

    @staticmethod
    def read_config(config: dict[str, Any]) -> LlavaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        text = read_text(config, "llama")
        return LlavaConfig.of(text, LlavaVisionConfig.of_next(config, text.hidden))

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        self.vision = LlavaVision(self.config.vision, dtype=dtype)

    def weight_map(self) -> WeightMap:
        targets = targets_by_module(self, self.names)
        aliases = spellings(targets, tied=self.config.tied)
        vision = self.config.vision
        unused = [TOWER + "head.", TOWER + "post_layernorm."]
        for layer in range(vision.layers, vision.tower.layers):
            unused.append(f"{TOWER}encoder.layers.{layer}.")
        ignored = [spelled for name in unused for spelled in (name, *other_spellings(name))]
        buffers = ("embeddings.position_ids", "rotary_emb.inv_freq")
        return WeightMap(targets, aliases=aliases, ignored=buffers, ignored_prefixes=ignored)


class LlavaOnevision(LlavaNext):
    names: ClassVar[Names] = under(NAMES, "", TEXT) | under(LlavaVision.names, "vision.", "")

    @staticmethod
    def read_config(config: dict[str, Any]) -> LlavaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        text = read_text(config, "qwen2")
        return LlavaConfig.of(text, LlavaVisionConfig.of_onevision(config, text.hidden))
