"""DeepSeek-V3 and R1 (arXiv 2412.19437): V2 with sigmoid scores and a bias for the choice."""

from __future__ import annotations

from typing import Any

from engine.layers.experts import RouterShape
from engine.models.base import expect, positive
from engine.models.deepseek_v2 import (
    DeepseekConfig,
    DeepseekV2,
    deepseek_config,
    expert_groups,
    experts_shape,
    latent_shape,
    routed_scale,
)


class DeepseekV3(DeepseekV2):
    @staticmethod
    def read_config(config: dict[str, Any]) -> DeepseekConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        expect(config, "scoring_func", "sigmoid")
        expect(config, "topk_method", "noaux_tc")
        router = RouterShape(
            is_sigmoid=True,
            has_choice_bias=True,
            groups=expert_groups(config, best=2),
            scale=routed_scale(config, 2.5),
            is_wide=True,
        )
        renormalises = bool(config.get("norm_topk_prob", True))
        experts = experts_shape(config, router, renormalises=renormalises)
        latent = latent_shape(config, rotates_pairs=bool(config.get("rope_interleave", True)))
        return deepseek_config(config, experts, latent, draft_layers=_draft_layers(config))


def _draft_layers(config: dict[str, Any]) -> int:
    """Return the number of layers for multi-token prediction, from either name."""
    key = "num_nextn_predict_layers"
    count = config.get(key, config.get("num_mtp_layers"))
    return positive({key: count}, key) if count else 0
