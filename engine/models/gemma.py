"""Gemma (arXiv 2403.08295): Llama with GeGLU, norms that multiply by 1 + weight, embeddings times
sqrt(hidden), and these for its head."""

from __future__ import annotations

from typing import Any

from engine.layers.norm import OffsetRMSNorm
from engine.models.base import expect, positive
from engine.models.llama import Llama, LlamaConfig


def gemma_spelling(config: dict[str, Any]) -> dict[str, Any]:
    """A Gemma config in Llama's words; ConfigError for variants no Gemma file computes.

    "gelu" is what the first releases called the tanh form; all were trained with that.
    """
    expect(config, "hidden_act", None, "gelu", "gelu_pytorch_tanh")
    expect(config, "hidden_activation", None, "gelu_pytorch_tanh")
    expect(config, "use_bidirectional_attention", None, False)
    return {"tie_word_embeddings": True} | config | {"hidden_act": "gelu_pytorch_tanh"}


def gemma_facts(config: dict[str, Any]) -> dict[str, Any]:
    """What every Gemma has of its own."""
    return {"norm": OffsetRMSNorm, "embed_scale": positive(config, "hidden_size") ** 0.5}


class Gemma(Llama):
    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """The facts of a Gemma checkpoint; ConfigError for a missing key or another variant."""
        return LlamaConfig.from_hf(gemma_spelling(config), **gemma_facts(config))
