"""Mixtral (arXiv 2401.04088): Mistral with a mixture of experts in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from engine.layers.experts import ExpertsShape
from engine.models.base import experts_per_token, positive
from engine.models.llama import NAMES, LlamaConfig
from engine.models.mistral import Mistral


class Mixtral(Mistral):
    names: ClassVar[Mapping[str, str]] = NAMES | {
        "blocks.{i}.mlp.router": "model.layers.{i}.block_sparse_moe.gate",
        "blocks.{i}.mlp.expert_up": "model.layers.{i}.block_sparse_moe.experts.{part}",
        "blocks.{i}.mlp.expert_down": "model.layers.{i}.block_sparse_moe.experts.{part}",
    }

    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        plain = Mistral.read_config(config)
        count = positive(config, "num_local_experts")
        chosen = experts_per_token(config, count)
        parts = ("w1", "w3", "w2")
        experts = ExpertsShape(count, chosen, plain.intermediate, renormalises=True, parts=parts)
        return replace(plain, experts=experts)
