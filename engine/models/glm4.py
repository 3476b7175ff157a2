"""GLM-4-0414 and GLM-Z1 (Z.ai, 2025): GLM with norms before and after each sublayer."""

from __future__ import annotations

from typing import Any

from engine.models.base import attention_heads
from engine.models.gemma2 import Gemma2, Gemma2Config
from engine.models.glm import NAMES_GLM, glm_facts, glm_spelling


class Glm4(Gemma2):
    names = NAMES_GLM | {
        "blocks.{i}.attention_post_norm": "model.layers.{i}.post_self_attn_layernorm",
        "blocks.{i}.mlp_post_norm": "model.layers.{i}.post_mlp_layernorm",
    }

    @staticmethod
    def read_config(config: dict[str, Any]) -> Gemma2Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        config = glm_spelling(config)
        _, _, head_dim = attention_heads(config)
        return Gemma2Config.from_hf(
            config,
            **glm_facts(config),
            scale=head_dim**-0.5,
            attention_softcap=None,
            final_softcap=None,
        )
