"""OLMoE (arXiv 2409.02060): Llama with experts in each layer.

Queries and keys are normed as in OLMo 2, over the whole projection.
"""

from __future__ import annotations

from typing import Any

from engine.layers.experts import ExpertsShape
from engine.models.base import expect, experts_per_token, positive, shared_by
from engine.models.llama import Llama, LlamaBlock, LlamaConfig
from engine.models.olmo2 import Olmo2Attention
from engine.models.qwen3_moe import Qwen3Moe


class OlmoeBlock(LlamaBlock):
    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__(config, index)
        self.attention = Olmo2Attention(config, index)


class Olmoe(Llama):
    block = OlmoeBlock
    names = Qwen3Moe.names

    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        hidden, heads = shared_by(config, "hidden_size", "num_attention_heads")
        expect(config, "head_dim", None, hidden // heads)
        expect(config, "clip_qkv", None)
        expect(config, "sliding_window", None)
        # transformers 5 writes the number under the name that Mixtral has.
        key = "num_experts" if "num_experts" in config else "num_local_experts"
        count = positive(config, key)
        experts = ExpertsShape(
            count,
            experts_per_token(config, count),
            positive(config, "intermediate_size"),
            renormalises=bool(config.get("norm_topk_prob", False)),
        )
        return LlamaConfig.from_hf(config, experts=experts)
