"""Qwen3, mixture of experts (arXiv 2505.09388): Qwen3 with experts in most or all layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from engine.errors import ConfigError
from engine.layers.experts import ExpertsShape
from engine.models.base import expect, experts_per_token, layer_count, nullable, positive
from engine.models.llama import NAMES, Llama, LlamaConfig
from engine.models.qwen3 import HEAD_DIM

NAMES_MOE = NAMES | {
    "blocks.{i}.mlp.router": "model.layers.{i}.mlp.gate",
    "blocks.{i}.mlp.expert_up": "model.layers.{i}.mlp.experts.{part}_proj",
    "blocks.{i}.mlp.expert_down": "model.layers.{i}.mlp.experts.{part}_proj",
}


class Qwen3Moe(Llama):
    names: ClassVar[Mapping[str, str]] = NAMES_MOE

    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant.

        A window is that of all layers. `layer_types` is refused, because the reference ignores it.
        """
        expect(config, "layer_types", None)
        layers = layer_count(config)
        slides = config.get("use_sliding_window", False)
        window = nullable(config, "sliding_window", positive) if slides else None
        # transformers 5 writes the number under the name that Mixtral has.
        key = "num_experts" if "num_experts" in config else "num_local_experts"
        count = positive(config, key)
        experts = ExpertsShape(
            count,
            experts_per_token(config, count),
            positive(config, "moe_intermediate_size"),
            renormalises=bool(config.get("norm_topk_prob", False)),
        )
        return LlamaConfig.from_hf(
            {"head_dim": HEAD_DIM} | config,
            windows=(window,) * layers,
            qk_norm=True,
            experts=experts,
            dense_layers=dense_layers(config, layers),
        )


def dense_layers(config: dict[str, Any], layers: int) -> frozenset[int]:
    """Return the layers without experts. Raises ConfigError if `mlp_only_layers` is malformed."""
    given = config.get("mlp_only_layers") or []
    if not isinstance(given, list) or any(type(index) is not int for index in given):
        raise ConfigError(f"config.json has mlp_only_layers = {given!r}; it must be a list.")
    step = positive(config, "decoder_sparse_step", 1)
    between = {index for index in range(layers) if (index + 1) % step}
    return frozenset(between | set(given))
