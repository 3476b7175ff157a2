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

EXPERTS = "model.layers.{i}.block_sparse_moe."
LINEARS = ("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight")


def with_stacked_experts(plain: WeightMap, experts: ExpertsShape | None) -> WeightMap:
    """Return the map if one tensor has the gates and ups of all experts, another their downs."""
    if experts is None:
        return plain
    targets = {
        name: replace(target, experts=experts.count) if name.endswith(LINEARS) else target
        for name, target in plain.targets.items()
    }
    return replace(plain, targets=targets)


class GraniteMoe(Granite):
    names: ClassVar[Mapping[str, str]] = NAMES | {
        "blocks.{i}.mlp.router": f"{EXPERTS}router.layer",
        "blocks.{i}.mlp.expert_up": f"{EXPERTS}input_linear",
        "blocks.{i}.mlp.expert_down": f"{EXPERTS}output_linear",
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
        return with_stacked_experts(super().weight_map(), self.config.experts)
