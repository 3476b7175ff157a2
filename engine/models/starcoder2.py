"""StarCoder2 (arXiv 2402.19173): Llama with LayerNorm, biases and a plain MLP.

A sliding window, if there is one, is that of all layers.
"""

from __future__ import annotations

from typing import Any

from engine.layers.norm import LayerNorm
from engine.models.base import expect, layer_count, nullable, positive, positive_float
from engine.models.llama import NAMES, Llama, LlamaConfig

DEFAULTS = {
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "sliding_window": None,
}


class Starcoder2(Llama):
    names = NAMES | {
        "blocks.{i}.mlp.up": "model.layers.{i}.mlp.c_fc",
        "blocks.{i}.mlp.down": "model.layers.{i}.mlp.c_proj",
    }

    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        expect(config, "layer_types", None)
        expect(config, "norm_type", "layer_norm")
        expect(config, "mlp_type", "default")
        config = DEFAULTS | config
        bias = bool(config.get("use_bias", True))
        window = nullable(config, "sliding_window", positive)
        return LlamaConfig.from_hf(
            config,
            norm=LayerNorm,
            norm_eps=positive_float(config, "norm_epsilon"),
            gated=False,
            qkv_bias=bias,
            out_bias=bias,
            mlp_bias=bias,
            windows=(window,) * layer_count(config),
        )
