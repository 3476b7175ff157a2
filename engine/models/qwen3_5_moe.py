"""Qwen3.5 with a mixture of experts in place of each MLP, and a shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.checkpoint.weight_map import WeightMap, fused_experts
from engine.layers.experts import ExpertsShape
from engine.models.base import expect
from engine.models.qwen2_moe import experts_with_shared
from engine.models.qwen3_5 import (
    Qwen35,
    SeeingQwen35,
    SeeingQwen35Config,
    seeing_facts,
    text_config,
)
from engine.models.qwen3_next import Qwen3NextConfig


def mixture_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config of the language model. Raises ConfigError for an unsupported variant."""
    config = text_config(config)
    # The reference ignores these keys of other Qwen models.
    expect(config, "norm_topk_prob", None, True)
    expect(config, "mlp_only_layers", None, [])
    expect(config, "decoder_sparse_step", None, 1)
    # No layer has an MLP of the plain kind, so its size is not in config.json.
    return {"intermediate_size": experts_of(config).intermediate} | config


def experts_of(config: dict[str, Any]) -> ExpertsShape:
    return experts_with_shared(config, renormalises=True)


def with_fused_experts(weight_map: WeightMap, config: Qwen3NextConfig) -> WeightMap:
    """Return the WeightMap of published checkpoints too: two tensors have a layer's experts.

    transformers saves them one by one.
    """
    assert config.experts is not None
    experts = "blocks.{i}.mlp", "layers.{i}.mlp.experts"
    return replace(weight_map, fused=fused_experts(*experts, config.layers, config.experts.count))


class Qwen35Moe(Qwen35):
    @staticmethod
    def read_config(config: dict[str, Any]) -> Qwen3NextConfig:
        text = mixture_config(config)
        return Qwen3NextConfig.from_hf(text, experts=experts_of(text))

    def weight_map(self) -> WeightMap:
        return with_fused_experts(super().weight_map(), self.config)


class SeeingQwen35Moe(SeeingQwen35):
    @staticmethod
    def read_config(config: dict[str, Any]) -> SeeingQwen35Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        text, facts = mixture_config(config), seeing_facts(config)
        return SeeingQwen35Config.from_hf(text, experts=experts_of(text), **facts)

    def weight_map(self) -> WeightMap:
        return with_fused_experts(super().weight_map(), self.config)
