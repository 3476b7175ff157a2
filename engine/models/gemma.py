"""Gemma (arXiv 2403.08295): Llama with GeGLU and norms that multiply by 1 + weight.

Token embeddings are multiplied by sqrt(hidden); the head is tied to them.
"""

from __future__ import annotations

from typing import Any

from engine.layers.norm import OffsetRMSNorm
from engine.models.base import expect, positive
from engine.models.llama import Llama, LlamaConfig


def gemma_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """Return a Gemma config with Llama's keys. Raises ConfigError for unsupported variants.

    The first releases call the activation "gelu", but all were trained with its tanh form.
    """
    expect(config, "hidden_act", None, "gelu", "gelu_pytorch_tanh")
    expect(config, "hidden_activation", None, "gelu_pytorch_tanh")
    expect(config, "use_bidirectional_attention", None, False)
    return {"tie_word_embeddings": True} | config | {"hidden_act": "gelu_pytorch_tanh"}


def gemma_facts(config: dict[str, Any]) -> dict[str, Any]:
    """Return the LlamaConfig fields in which every Gemma differs from Llama."""
    return {"norm": OffsetRMSNorm, "embed_scale": positive(config, "hidden_size") ** 0.5}


class Gemma(Llama):
    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        return LlamaConfig.from_hf(gemma_spelling(config), **gemma_facts(config))
