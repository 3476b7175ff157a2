"""Phi-3, Phi-3.5 and Phi-4 dense (arXiv 2404.14219, 2412.08905, 2503.01743).

Llama with fused tensors, an optional sliding window on all layers, and longrope scaling. Phi-4-mini
rotates only a part of each head.
"""

from __future__ import annotations

from typing import Any

from engine.layers.rotary import RopeScaling
from engine.models.base import expect, layer_count, positive
from engine.models.llama import NAMES, Llama, LlamaConfig

ORIGINAL_POSITIONS = 4096  # if config.json has no original_max_position_embeddings
OLD_NAMES = ("su", "yarn")  # of longrope


def _with_longrope(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with today's name of longrope."""
    for key in ("rope_parameters", "rope_scaling"):
        given = config.get(key)
        if not isinstance(given, dict):
            continue
        kind = given.get("rope_type") or given.get("type")
        if kind in OLD_NAMES:
            config = config | {key: given | {"rope_type": "longrope"}}
    return config


class Phi3(Llama):
    names = NAMES | {
        "blocks.{i}.attention.qkv": "model.layers.{i}.self_attn.qkv_proj",
        "blocks.{i}.mlp.up": "model.layers.{i}.mlp.gate_up_proj",
    }

    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        expect(config, "layer_types", None)
        for key in ("attention_bias", "mlp_bias", "lm_head_bias"):
            expect(config, key, None, False)
        window = None
        if config.get("sliding_window") is not None:
            window = positive(config, "sliding_window")
        config = {"original_max_position_embeddings": ORIGINAL_POSITIONS} | _with_longrope(config)
        return LlamaConfig.from_hf(
            config,
            rope_scaling=RopeScaling.from_hf(config, partial=True),
            windows=(window,) * layer_count(config),
        )
