"""Idefics3 (arXiv 2408.12637) and SmolVLM (arXiv 2504.05299): Llama that sees tiles of pictures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from engine.checkpoint.weight_map import Names, WeightMap, targets_by_module
from engine.models.base import expect
from engine.models.llama import NAMES, Llama, LlamaConfig
from engine.models.multimodal import LLAMA_DEFAULTS, names_inside, nested_config
from engine.models.vision.block import under
from engine.models.vision.idefics3 import Idefics3Vision, Idefics3VisionConfig

TEXT = "model.text_model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Idefics3Config(LlamaConfig):
    vision: Idefics3VisionConfig


class Idefics3(Llama):
    names: ClassVar[Names] = {
        **names_inside(NAMES, TEXT),
        **under(Idefics3Vision.names, "vision.", "model."),
    }
    config: Idefics3Config

    @staticmethod
    def read_config(config: dict[str, Any]) -> Idefics3Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        text = nested_config(config)
        expect(text, "model_type", "llama")
        tied = bool(config.get("tie_word_embeddings", False))
        text = LLAMA_DEFAULTS | text | {"tie_word_embeddings": tied}
        hidden = LlamaConfig.from_hf(text).hidden
        return Idefics3Config.from_hf(text, vision=Idefics3VisionConfig.from_hf(config, hidden))

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        self.vision = Idefics3Vision(self.config.vision, dtype=dtype)

    def weight_map(self) -> WeightMap:
        aliases = {TEXT + "embed_tokens.weight": ("lm_head.weight",)} if self.config.tied else {}
        return WeightMap(targets_by_module(self, self.names), aliases=aliases)
