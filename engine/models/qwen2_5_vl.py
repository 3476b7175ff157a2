"""Qwen2.5-VL (arXiv 2502.13923): Qwen2.5 that sees pictures of any size, with MRoPE.

Published files have the language model's settings at the top of config.json, newer ones
inside `text_config`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from engine.checkpoint.weight_map import Names, WeightMap, targets_by_module
from engine.layers.rotary import RopeScaling
from engine.layers.rotary_sections import RotarySections
from engine.models.base import attention_heads, expect, required
from engine.models.llama import NAMES, Llama, LlamaConfig
from engine.models.multimodal import expect_width, nested_config, without_mrope
from engine.models.qwen2 import qwen_windows
from engine.models.vision.block import under
from engine.models.vision.qwen2_5 import Qwen25Vision, Qwen25VisionConfig

# The defaults of transformers: config.json may omit values that equal them.
TEXT_DEFAULTS: dict[str, Any] = {
    "vocab_size": 152064,
    "hidden_size": 8192,
    "intermediate_size": 29568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "max_window_layers": 80,
}
ROPE_THETA = 1000000.0
SECTIONS = (16, 24, 24)  # frequencies of time, height and width


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen25VLConfig(LlamaConfig):
    vision: Qwen25VisionConfig


def read_text(config: dict[str, Any]) -> dict[str, Any]:
    """Return the language model's settings. Its embedding is tied if either place says so.

    Raises ConfigError unless there is a `vision_config`, or if they are no object.
    """
    required(config, "vision_config")
    given = nested_config(config) if "text_config" in config else config
    expect(given, "model_type", "qwen2_5_vl_text", "qwen2_5_vl")
    tied = bool(config.get("tie_word_embeddings") or given.get("tie_word_embeddings"))
    text = {"rope_theta": ROPE_THETA, **TEXT_DEFAULTS, **given, "tie_word_embeddings": tied}
    return without_mrope(text)


class Qwen25VL(Llama):
    names: ClassVar[Names] = dict(NAMES) | under(Qwen25Vision.names, "vision.", "visual.")
    config: Qwen25VLConfig

    @staticmethod
    def read_config(config: dict[str, Any]) -> Qwen25VLConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        text = read_text(config)
        frequencies = attention_heads(text)[2] // 2
        parameters = text["rope_parameters"]
        read = Qwen25VLConfig.from_hf(
            text,
            windows=qwen_windows(text),
            qkv_bias=True,
            out_bias=False,
            rope_scaling=RopeScaling.from_hf(text),
            sections=RotarySections.from_hf(parameters, SECTIONS, frequencies, interleaved=False),
            vision=Qwen25VisionConfig.read(config),
        )
        expect_width(read.vision.out_hidden, read.hidden)
        return read

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        self.vision = Qwen25Vision(self.config.vision, dtype=dtype)

    def weight_map(self) -> WeightMap:
        targets = targets_by_module(self, self.names)
        # transformers has these names in memory.
        aliases = {name: [_in_memory(name)] for name in targets if name != "lm_head.weight"}
        if self.config.tied:
            aliases["model.embed_tokens.weight"].append("lm_head.weight")
        ignored = ("rotary_emb.inv_freq", "rotary_pos_emb.inv_freq")
        return WeightMap(targets, aliases=aliases, ignored=ignored)


def _in_memory(name: str) -> str:
    if name.startswith("visual."):
        return "model." + name
    return "model.language_model." + name.removeprefix("model.")
