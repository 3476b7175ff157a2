"""LFM2 with a mixture of experts behind the first layers (arXiv 2511.23404)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from engine.checkpoint.weight_map import WeightMap
from engine.errors import ConfigError
from engine.layers.experts import ExpertsShape, RouterShape
from engine.models.base import experts_per_token, positive, positive_float, required
from engine.models.lfm2 import Lfm2, Lfm2Config

# Keys that only dense checkpoints have; the reference ignores them here.
OF_DENSE = {"full_attn_idxs": None, "block_ff_dim": None, "block_auto_adjust_ff_dim": False}
EPS = 1e-6  # of renormalised weights; no config has it
BIAS = "gate.e_score_correction_bias"


class Lfm2Moe(Lfm2):
    names: ClassVar[Mapping[str, str]] = dict(Lfm2.names) | {
        "blocks.{i}.mlp.router": "model.layers.{i}.feed_forward.gate",
        "blocks.{i}.mlp.expert_up": "model.layers.{i}.feed_forward.experts.{part}",
        "blocks.{i}.mlp.expert_down": "model.layers.{i}.feed_forward.experts.{part}",
    }

    @staticmethod
    def read_config(config: dict[str, Any]) -> Lfm2Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        required(config, "layer_types")
        plain = Lfm2.read_config(config | OF_DENSE)
        count = positive(config, "num_experts")
        router = RouterShape(
            is_sigmoid=True,
            has_choice_bias=bool(config.get("use_expert_bias", True)),
            scale=positive_float({"routed_scaling_factor": 1.0} | config, "routed_scaling_factor"),
            is_wide=True,
            eps=EPS,
        )
        experts = ExpertsShape(
            count,
            experts_per_token(config, count),
            positive(config, "moe_intermediate_size"),
            renormalises=bool(config.get("norm_topk_prob", True)),
            parts=("w1", "w3", "w2"),
            router=router,
        )
        return replace(plain, experts=experts, dense_layers=frozenset(range(_dense(config))))

    def weight_map(self) -> WeightMap:
        """Return the map. The bias of a router has its name outside of the router."""
        plain = super().weight_map()
        targets = {
            name.removesuffix(BIAS) + "expert_bias" if name.endswith(BIAS) else name: target
            for name, target in plain.targets.items()
        }
        return replace(plain, targets=targets)


def _dense(config: dict[str, Any]) -> int:
    """Return how many layers have no experts: the first ones."""
    given = config.get("num_dense_layers", 2)
    if type(given) is not int or given < 0:
        raise ConfigError(
            f"config.json has num_dense_layers = {given!r:.99}; it must be a whole number from 0."
        )
    return min(given, config["num_hidden_layers"])
