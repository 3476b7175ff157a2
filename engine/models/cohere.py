"""Command R and Aya 23 (Cohere, 2024): attention and MLP side by side, after one LayerNorm.

Rotary embedding turns neighbouring dimensions. Logits are multiplied by a factor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.layers.norm import Join, LayerNorm
from engine.models.base import expect, positive_float
from engine.models.llama import Llama, LlamaConfig, llama_attention, llama_mlp
from engine.ops.norm import Tensors

LOGIT_SCALE, NORM_EPS = 0.0625, 1e-5  # if config.json has none
THETA = 5e5  # if config.json of the first generation has no rope_theta
# Keys of published checkpoints that the reference does not read.
FIXED: dict[str, tuple[Any, ...]] = {
    "use_qk_norm": (None, False),
    "use_parallel_block": (None, True),
    "use_gated_activation": (None, True),
    "position_embedding_type": (None, "rope_gptj"),
    "rotary_pct": (None, 1, 1.0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CohereConfig(LlamaConfig):
    """The config of a Command R checkpoint."""

    logit_scale: float

    @classmethod
    def from_hf(cls, config: dict[str, Any], **own: Any) -> Self:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        for key, allowed in FIXED.items():
            expect(config, key, *allowed)
        expect(config, "mlp_bias", None, False)
        defaults = {
            "layer_norm_eps": NORM_EPS,
            "logit_scale": LOGIT_SCALE,
            "tie_word_embeddings": True,
        }
        config = defaults | config
        return super(CohereConfig, cls).from_hf(
            config | {"rms_norm_eps": config["layer_norm_eps"]},
            pairs=True,
            logit_scale=positive_float(config, "logit_scale"),
            **own,
        )


class CohereBlock(nn.Module):
    def __init__(self, config: CohereConfig, index: int) -> None:
        super().__init__()
        c = config
        self.attention_norm = LayerNorm(c.hidden, c.norm_eps, bias=False)
        self.attention = llama_attention(c, index)
        self.joined = Join()
        self.mlp = llama_mlp(c, index)

    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: ForwardBatch,
    ) -> Tensors:
        """Return the residual stream [T, hidden] and the MLP's output, not yet added to it.

        `x` and `delta` are these two values of the previous block.
        """
        x, normed = self.attention_norm.add(x, delta)
        x, _ = self.joined.add(x, self.attention(normed, cos, sin, batch))
        return x, self.mlp(normed)


class Cohere(Llama):
    config: CohereConfig
    block = CohereBlock

    @staticmethod
    def read_config(config: dict[str, Any]) -> CohereConfig:
        return CohereConfig.from_hf({"rope_theta": THETA} | config)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        c = self.config
        self.norm = LayerNorm(c.hidden, c.norm_eps, bias=False)

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.mul(self.head(hidden, out), self.config.logit_scale, out=out)
