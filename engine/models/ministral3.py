"""Ministral 3 and Mistral Small 3 (Mistral AI, 2025): Mistral in multimodal checkpoints.

Ministral 3 multiplies queries by a factor that grows with the position. Multimodal checkpoints are
served as the language model that they contain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.attention.batch import ForwardBatch
from engine.checkpoint.weight_map import WeightMap, targets_by_module
from engine.layers.query_scale import QueryScales, QueryScaling
from engine.layers.rotary import rope_parameters
from engine.models.base import expect, layer_count, nullable, positive
from engine.models.llama import Llama, LlamaBlock, LlamaConfig
from engine.models.multimodal import nested_config, nested_weight_map
from engine.ops.norm import Tensors

# The defaults of transformers. A nested text_config omits values that equal them.
SHARED_DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
TEXT_DEFAULTS: dict[str, dict[str, Any]] = {
    "mistral": SHARED_DEFAULTS
    | {
        "vocab_size": 32000,
        "num_hidden_layers": 32,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    "ministral3": SHARED_DEFAULTS
    | {
        "vocab_size": 131072,
        "num_hidden_layers": 34,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
    },
}
ROPE = {  # if config.json has no rotary parameters
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ministral3Config(LlamaConfig):
    """The config of a Ministral 3 checkpoint, or of Mistral in a multimodal one."""

    query_scaling: QueryScaling | None

    @classmethod
    def of_text(cls, config: dict[str, Any], kind: str) -> Ministral3Config:
        """Read the config of a language model of the `kind` mistral or ministral3."""
        expect(config, "layer_types", None)  # the reference ignores it
        expect(config, "attention_bias", None, False)
        expect(config, "mlp_bias", None, False)
        scaling = None
        if kind == "ministral3":
            given = rope_parameters(config)
            if not given:
                config = config | {"rope_parameters": ROPE}
            scaling = QueryScaling.from_hf(config)
        windows = [nullable(config, "sliding_window", positive)]
        windows *= layer_count(config)
        return cls.from_hf(config, windows=tuple(windows), query_scaling=scaling)


class Ministral3Block(LlamaBlock):
    # It has one more argument than other blocks.
    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        query_scale: torch.Tensor | None,
        batch: ForwardBatch,
    ) -> Tensors:
        """Return the two values of LlamaBlock; `query_scale` [T, 1, 1] is a factor on queries."""
        x, normed = self.attention_norm.add(x, delta)
        attended = self.attention(normed, cos, sin, batch, query_scale)
        x, normed = self.mlp_norm.add(x, attended)
        return x, self.mlp(normed)


class Ministral3(Llama):
    config: Ministral3Config
    block = Ministral3Block

    @staticmethod
    def read_config(config: dict[str, Any]) -> Ministral3Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        return Ministral3Config.of_text({"head_dim": 128} | config, "ministral3")

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        scaling = self.config.query_scaling
        self.query_scales = QueryScales(scaling, max_positions, dtype) if scaling else None

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        x, delta = self.embed(batch.input_ids), None
        cos, sin = self.rotary(batch.positions)
        scale = self.query_scales(batch.positions) if self.query_scales else None
        for block in self.blocks:
            x, delta = block(x, delta, cos, sin, scale, batch)
        return self.norm.add(x, delta)[1]


class Mistral3(Ministral3):
    """The language model of a multimodal checkpoint: Mistral, or Ministral 3."""

    @staticmethod
    def read_config(config: dict[str, Any]) -> Ministral3Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant.

        As in transformers, `tie_word_embeddings` outside of text_config takes precedence.
        """
        text = nested_config(config)
        expect(text, "model_type", *TEXT_DEFAULTS)
        kind = text.get("model_type", "mistral")
        tied = config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))
        given = TEXT_DEFAULTS[kind] | text | {"tie_word_embeddings": tied}
        return Ministral3Config.of_text(given, kind)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        self._may_lack_head = "tie_word_embeddings" not in config

    def weight_map(self) -> WeightMap:
        """Return the map. Where config.json is silent, a head that is not stored is tied."""
        targets = targets_by_module(self, self.names)
        head, table = "lm_head.weight", "embed_tokens.weight"
        aliases = {}
        if self.config.tied:
            aliases = {table: [head]}
        elif self._may_lack_head:
            aliases = {head: [table]}
        stripped = {name.removeprefix("model."): target for name, target in targets.items()}
        return nested_weight_map(stripped, aliases)
