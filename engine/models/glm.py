"""GLM-4, first releases (arXiv 2406.12793): Llama with rotary embedding on half of each head.

Neighbouring dimensions rotate against each other. Queries, keys and values have biases.
"""

from __future__ import annotations

from typing import Any

from engine.layers.rotary import RopeScaling
from engine.models.base import expect
from engine.models.llama import NAMES, Llama, LlamaConfig

DEFAULTS = {"head_dim": 128, "attention_bias": True, "partial_rotary_factor": 0.5}
NAMES_GLM = NAMES | {"blocks.{i}.mlp.up": "model.layers.{i}.mlp.gate_up_proj"}


def glm_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return a GLM config with Llama's keys. Raises ConfigError for unsupported variants."""
    expect(config, "mlp_bias", None, False)
    return DEFAULTS | config


def glm_facts(config: dict[str, Any]) -> dict[str, Any]:
    """Return the LlamaConfig fields in which every GLM differs from Llama."""
    scaling = RopeScaling.from_hf(config, partial=True)
    return {"rope_scaling": scaling, "pairs": True, "out_bias": False}


class Glm(Llama):
    names = NAMES_GLM

    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        config = glm_spelling(config)
        return LlamaConfig.from_hf(config, **glm_facts(config))
