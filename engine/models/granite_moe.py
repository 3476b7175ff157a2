"""Granite 3 with experts (IBM), and PowerMoE (arXiv 2408.13359): Granite with experts everywhere.

A checkpoint's tensor holds all experts of a layer, each one's gate before its up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from engine.checkpoint.weight_map import WeightMap
from engine.layers.experts import ExpertsShape
from engine.models.base import experts_per_token, positive
from engine.models.granite import Granite, GraniteConfig
from engine.models.llama import NAMES

EXPERTS = "block_sparse_moe."
LINEARS = (f"{EXPERTS}input_linear.weight", f"{EXPERTS}output_linear.weight")


class GraniteMoe(Granite):
    names: ClassVar[Mapping[str, str]] = NAMES | {
        "blocks.{i}.mlp.router": "model.layers.{i}.block_sparse_moe.router.layer",
        "blocks.{i}.mlp.expert_up": "model.layers.{i}.block_sparse_moe.input_linear",
        "blocks.{i}.mlp.expert_down": "model.layers.{i}.block_sparse_moe.output_linear",
    }

    @staticmethod
    def read_config(config: dict[str, Any]) -> GraniteConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        plain = Granite.read_config(config)
        count = positive(config, "num_local_experts")
        chosen = experts_per_token(config, count)
        experts = ExpertsShape(count, chosen, plain.intermediate, renormalises=True)
        return replace(plain, experts=experts)

    def weight_map(self) -> WeightMap:
        plain = super().weight_map()
        assert self.config.experts is not None
        count = self.config.experts.count
        targets = {
            name: replace(target, experts=count) if name.endswith(LINEARS) else target
            for name, target in plain.targets.items()
        }
        return replace(plain, targets=targets)
