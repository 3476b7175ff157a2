"""Qwen3.5 with a mixture of experts in place of each MLP, and a shared expert."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.checkpoint.weight_map import WeightMap
from engine.models.base import expect
from engine.models.qwen2_moe import experts_with_shared
from engine.models.qwen3_5 import Qwen35, text_config
from engine.models.qwen3_next import Qwen3NextConfig, fused_experts


class Qwen35Moe(Qwen35):
    @staticmethod
    def read_config(config: dict[str, Any]) -> Qwen3NextConfig:
        config = text_config(config)
        # The reference ignores these keys of other Qwen models.
        expect(config, "norm_topk_prob", None, True)
        expect(config, "mlp_only_layers", None, [])
        expect(config, "decoder_sparse_step", None, 1)
        experts = experts_with_shared(config, renormalises=True)
        # No layer has an MLP of the plain kind, so its size is not in config.json.
        config = {"intermediate_size": experts.intermediate} | config
        return Qwen3NextConfig.from_hf(config, experts=experts)

    def weight_map(self) -> WeightMap:
        """Return the WeightMap. Published checkpoints have all experts of a layer in two tensors.

        transformers saves them one by one.
        """
        assert self.config.experts is not None
        layers = [f"layers.{index}" for index in range(self.config.layers)]
        fused = fused_experts(self.config.experts.count, layers)
        return replace(super().weight_map(), fused=fused)
