"""gpt-oss (arXiv 2508.10925).

Experts with biases, attention sinks, and a window in every other layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

from engine.checkpoint.quantized.formats import quantization_key
from engine.checkpoint.weight_map import Target, WeightMap
from engine.layers.experts import ClampedSwiGLU, ExpertsShape
from engine.models.base import experts_per_token, layer_windows, nullable, positive, positive_float
from engine.models.llama import NAMES, Llama, LlamaConfig

HEAD_DIM = 64  # if config.json has no head_dim
LIMIT, SHARPNESS = 7.0, 1.702  # of the activation, if config.json has none
EXPERTS = ".mlp.experts."
ROWS = "expert_rows"  # of GGUF files: "outputs", as in quantised checkpoints


class GptOss(Llama):
    names: ClassVar[Mapping[str, str]] = NAMES | {
        "blocks.{i}.attention": "model.layers.{i}.self_attn",
        "blocks.{i}.mlp.router": "model.layers.{i}.mlp.router",
        "blocks.{i}.mlp.expert_up": "model.layers.{i}.mlp.experts.gate_up_proj",
        "blocks.{i}.mlp.expert_down": "model.layers.{i}.mlp.experts.down_proj",
    }

    def __init__(self, config: dict[str, Any], **options: Any) -> None:
        super().__init__(config, **options)
        self._rows_are_outputs = bool(config.get(ROWS)) or quantization_key(config) is not None

    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        count = positive(config, "num_local_experts")
        activation = {"swiglu_limit": LIMIT, "swiglu_alpha": SHARPNESS} | config
        experts = ExpertsShape(
            count,
            experts_per_token(config, count),
            positive(config, "intermediate_size"),
            renormalises=True,
            parts=None,
            bias=True,
            activation=ClampedSwiGLU(
                positive_float(activation, "swiglu_limit"),
                positive_float(activation, "swiglu_alpha"),
            ),
        )
        window = nullable(config, "sliding_window", positive)
        return LlamaConfig.from_hf(
            {"head_dim": HEAD_DIM, "attention_bias": True} | config,
            windows=layer_windows(config, window, lambda index: index % 2 == 0),
            has_sinks=True,
            experts=experts,
        )

    def weight_map(self) -> WeightMap:
        """Return the map. A tensor holds all experts.

        Those of plain safetensors have inputs before outputs.
        """
        plain = super().weight_map()
        targets: dict[str, Target] = {}
        for name, target in plain.targets.items():
            if EXPERTS not in name:
                targets[name] = target
                continue
            module, _, kind = name.rpartition(".")
            if kind == "bias":
                targets[f"{module}_bias"] = replace(target, experts=self._count)
            elif self._rows_are_outputs:
                targets[module] = target
            else:
                targets[module] = replace(target, experts=self._count, transpose=True)
        return replace(plain, targets=targets)

    @property
    def _count(self) -> int:
        assert self.config.experts is not None
        return self.config.experts.count
