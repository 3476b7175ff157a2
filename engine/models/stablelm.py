"""StableLM 3B and 2 (arXiv 2402.17834): Llama with LayerNorm and rotary on a part of each head.

Attention and MLP may read the same normed stream. Each head of queries and keys may have its own
LayerNorm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.layers.norm import HeadLayerNorm, Join, LayerNorm
from engine.layers.rotary import RopeScaling
from engine.models.base import expect, positive_float, shared_by
from engine.models.llama import NAMES, Llama, LlamaConfig, llama_attention, llama_mlp, llama_spec
from engine.ops.norm import Tensors

ROTARY_SHARE = 0.25  # if config.json has no partial_rotary_factor
HEAD_NORM = "model.layers.{{i}}.self_attn.{}_layernorm.norms.{{part}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StableLMConfig(LlamaConfig):
    """The config of a StableLM checkpoint."""

    is_parallel: bool  # whether attention and MLP read the same stream
    has_head_norms: bool


class HeadNormedAttention(nn.Module):
    """Rotary attention with a LayerNorm for each head of queries and keys, before the rotation."""

    def __init__(self, config: StableLMConfig, index: int) -> None:
        super().__init__()
        spec, eps = llama_spec(config, index), config.norm_eps
        heads, kv_heads, dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.qkv = Linear(
            config.hidden,
            {"q": heads * dim, "k": kv_heads * dim, "v": kv_heads * dim},
            bias=config.qkv_bias,
            output_units={"q": heads, "k": kv_heads, "v": kv_heads},
        )
        self.q_norm = HeadLayerNorm(heads, dim, eps)
        self.k_norm = HeadLayerNorm(kv_heads, dim, eps)
        self.attend = Attention(spec, index)
        self.out = Linear(heads * dim, config.hidden, input_units=heads)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """x [T, hidden], cos and sin [T, 1, rotated dimensions] -> [T, hidden]."""
        spec = self.attend.spec
        sizes = spec.num_heads, spec.num_kv_heads, spec.num_kv_heads
        q, k, v = self.qkv(x).unflatten(1, (-1, spec.head_dim)).split(sizes, dim=1)
        qk = torch.cat((self.q_norm(q), self.k_norm(k)), dim=1)
        return self.out(self.attend.rotate_and_attend(qk, v, (cos, sin), None, batch))


class StableLMBlock(nn.Module):
    def __init__(self, config: StableLMConfig, index: int) -> None:
        super().__init__()
        c = config
        self.attention_norm = LayerNorm(c.hidden, c.norm_eps)
        attention = HeadNormedAttention if c.has_head_norms else llama_attention
        self.attention = attention(c, index)
        self.mlp_norm = Join() if c.is_parallel else LayerNorm(c.hidden, c.norm_eps)
        self.is_parallel = c.is_parallel
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
        x, after = self.mlp_norm.add(x, self.attention(normed, cos, sin, batch))
        return x, self.mlp(normed if self.is_parallel else after)


class StableLM(Llama):
    config: StableLMConfig
    block = StableLMBlock
    names = NAMES | {
        "blocks.{i}.attention.q_norm": HEAD_NORM.format("q"),
        "blocks.{i}.attention.k_norm": HEAD_NORM.format("k"),
    }

    @staticmethod
    def read_config(config: dict[str, Any]) -> StableLMConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        hidden, heads = shared_by(config, "hidden_size", "num_attention_heads")
        expect(config, "head_dim", None, hidden // heads)
        expect(config, "mlp_bias", None, False)
        config = {"partial_rotary_factor": ROTARY_SHARE} | config
        return StableLMConfig.from_hf(
            config,
            norm=LayerNorm,
            norm_eps=positive_float(config, "layer_norm_eps"),
            rope_scaling=RopeScaling.from_hf(config, partial=True),
            qkv_bias=bool(config.get("use_qkv_bias", False)),
            out_bias=False,
            is_parallel=bool(config.get("use_parallel_residual", False)),
            has_head_norms=bool(config.get("qk_layernorm", False)),
        )
