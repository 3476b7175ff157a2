"""Qwen3-VL (arXiv 2511.21631): Qwen3 that sees pictures of any size, with DeepStack and MRoPE.

Rotary frequencies of time, height and width are interleaved. `mrope_interleaved` has no effect, as
in the reference.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from engine.attention.batch import ForwardBatch
from engine.checkpoint.weight_map import Names, WeightMap, targets_by_module
from engine.layers.rotary import RopeScaling
from engine.layers.rotary_sections import RotarySections
from engine.models.base import attention_heads, expect
from engine.models.llama import NAMES, Llama, LlamaConfig
from engine.models.multimodal import expect_width, names_inside, nested_config, without_mrope
from engine.models.vision.block import under
from engine.models.vision.qwen3 import Qwen3Vision, Qwen3VisionConfig

TEXT = "model.language_model."
# The defaults of transformers: a nested text_config may omit values that equal them.
TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 128000,
    "rms_norm_eps": 1e-6,
}
ROPE_THETA = 500000.0
SECTIONS = (24, 20, 20)  # frequencies of time, height and width


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3VLConfig(LlamaConfig):
    vision: Qwen3VisionConfig


class Qwen3VL(Llama):
    names: ClassVar[Names] = {
        **names_inside(NAMES, TEXT),
        **under(Qwen3Vision.names, "vision.", "model.visual."),
    }
    config: Qwen3VLConfig

    @staticmethod
    def read_config(config: dict[str, Any]) -> Qwen3VLConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        text = {"rope_theta": ROPE_THETA, **TEXT_DEFAULTS, **nested_config(config)}
        expect(text, "model_type", "qwen3_vl_text")
        text = without_mrope(text) | {"tie_word_embeddings": config.get("tie_word_embeddings")}
        frequencies = attention_heads(text)[2] // 2
        parameters = text["rope_parameters"]
        read = Qwen3VLConfig.from_hf(
            text,
            qk_norm=True,
            rope_scaling=RopeScaling.from_hf(text),
            sections=RotarySections.from_hf(parameters, SECTIONS, frequencies, interleaved=True),
            vision=Qwen3VisionConfig.read(config),
        )
        expect_width(read.vision.out_hidden, read.hidden)
        return read

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        self.vision = Qwen3Vision(self.config.vision, dtype=dtype)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """Compute the hidden states [T, hidden]. The first layers add embeddings to images."""
        if batch.seen is None:
            return super().forward(batch)
        cos, sin = self.rotary(batch.positions)
        x, delta = self.inputs(batch), None
        for index, block in enumerate(self.blocks):
            x, delta = block(x, delta, cos, sin, batch)
            x = batch.seen.add_deep(x, index)
        return self.norm.add(x, delta)[1]

    def weight_map(self) -> WeightMap:
        aliases = {TEXT + "embed_tokens.weight": ("lm_head.weight",)} if self.config.tied else {}
        return WeightMap(targets_by_module(self, self.names), aliases=aliases)
