"""Qwen1.5-MoE and Qwen2-57B-A14B (arXiv 2407.10671): Qwen2 with experts in most or all layers.

Every token also uses a shared expert, weighed by a gate.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.errors import ConfigError
from engine.layers.experts import ExpertsShape, SharedExpert
from engine.models.base import experts_per_token, layer_count, layer_windows, nullable, positive
from engine.models.llama import Llama, LlamaConfig
from engine.models.qwen2 import DENSE_LAYERS
from engine.models.qwen3_moe import NAMES_MOE, dense_layers


class Qwen2Moe(Llama):
    names: ClassVar[Mapping[str, str]] = NAMES_MOE | {
        "blocks.{i}.mlp.shared.up": "model.layers.{i}.mlp.shared_expert.{part}_proj",
        "blocks.{i}.mlp.shared.down": "model.layers.{i}.mlp.shared_expert.down_proj",
        "blocks.{i}.mlp.shared_gate": "model.layers.{i}.mlp.shared_expert_gate",
    }

    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        renormalises = bool(config.get("norm_topk_prob", False))
        return LlamaConfig.from_hf(
            config,
            windows=_windows(config),
            qkv_bias=bool(config.get("qkv_bias", True)),
            out_bias=False,
            experts=experts_with_shared(config, renormalises=renormalises),
            dense_layers=dense_layers(config, layer_count(config)),
        )


def experts_with_shared(config: dict[str, Any], *, renormalises: bool) -> ExpertsShape:
    """Return the experts, with a gated shared expert. Raises ConfigError if a key is missing."""
    count = positive(config, "num_experts")
    return ExpertsShape(
        count,
        experts_per_token(config, count),
        positive(config, "moe_intermediate_size"),
        renormalises=renormalises,
        shared=SharedExpert(positive(config, "shared_expert_intermediate_size"), is_gated=True),
    )


def _windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """Return each layer's window. Without `layer_types`, every other early layer has one.

    `sliding_window` has no effect unless `use_sliding_window` is true.
    """
    slides = config.get("use_sliding_window", False)
    window = nullable(config, "sliding_window", positive) if slides else None
    early = config.get("max_window_layers", DENSE_LAYERS)
    if type(early) is not int:
        raise ConfigError(f"config.json has max_window_layers = {early!r}; it must be an integer.")
    return layer_windows(config, window, lambda i: window is not None and i % 2 == 0 and i < early)
