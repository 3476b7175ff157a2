"""OLMo 2 (arXiv 2501.00656): Llama with norms after the sublayers instead of before them.

Queries and keys are normed before the rotation, over the whole projection and not per head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.layers.attention import Attention
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import Join, RMSNorm, SharedRMSNorm, norm_together
from engine.models.base import expect
from engine.models.llama import NAMES, Llama, LlamaConfig, llama_spec
from engine.ops.norm import Tensors

NAMES_OLMO2 = NAMES | {
    "blocks.{i}.attention_norm": "model.layers.{i}.post_attention_layernorm",
    "blocks.{i}.mlp_norm": "model.layers.{i}.post_feedforward_layernorm",
}


def check_olmo(config: dict[str, Any]) -> None:
    """Raise ConfigError for a variant of OLMo 1 or of Llama that OLMo 2 and 3 do not have."""
    expect(config, "clip_qkv", None)
    expect(config, "mlp_bias", None, False)


class Olmo2Attention(nn.Module):
    """Rotary attention whose norms of queries and keys are as wide as their projections."""

    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        spec = llama_spec(config, index)
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        queries, keys = heads * spec.head_dim, kv_heads * spec.head_dim
        self.qkv = Linear(
            config.hidden,
            {"q": queries, "k": keys, "v": keys},
            bias=config.qkv_bias,
            output_units={"q": heads, "k": kv_heads, "v": kv_heads},
        )
        self.q_norm = SharedRMSNorm(heads, spec.head_dim, config.norm_eps)
        self.k_norm = SharedRMSNorm(kv_heads, spec.head_dim, config.norm_eps)
        self.attend = Attention(spec, index)
        self.out = Linear(queries, config.hidden, bias=config.out_bias, input_units=heads)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        """x [T, hidden], cos and sin [T, 1, head_dim] -> [T, hidden]."""
        sizes = [rows.stop - rows.start for rows in self.qkv.tensors.slices.values()]
        q, k, v = self.qkv(x).split(sizes, dim=1)
        qk = torch.cat(norm_together((self.q_norm, self.k_norm), (q, k)), dim=1)
        heads = (-1, self.attend.spec.head_dim)
        qk, v = qk.unflatten(1, heads), v.unflatten(1, heads)
        attended = self.attend.rotate_and_attend(qk, v, (cos, sin), None, batch)
        return self.out(attended)


class Olmo2Block(nn.Module):
    def __init__(self, config: LlamaConfig, index: int) -> None:
        super().__init__()
        c = config
        self.entry = Join()
        self.attention: nn.Module = Olmo2Attention(c, index)
        self.attention_norm = RMSNorm(c.hidden, c.norm_eps)
        self.middle = Join()
        self.mlp = GatedMLP(c.hidden, c.intermediate, c.activation)
        self.mlp_norm = RMSNorm(c.hidden, c.norm_eps)

    def forward(
        self,
        x: torch.Tensor,
        delta: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        batch: ForwardBatch,
    ) -> Tensors:
        """Return the residual stream [T, hidden] and the MLP's normed output, not yet added to it.

        `x` and `delta` are these two values of the previous block.
        """
        x, _ = self.entry.add(x, delta)
        attended = self.attention(x, cos, sin, batch)
        x, _ = self.middle.add(x, self.attention_norm(attended))
        return x, self.mlp_norm(self.mlp(x))


class Olmo2(Llama):
    block = Olmo2Block
    names = NAMES_OLMO2

    @staticmethod
    def read_config(config: dict[str, Any]) -> LlamaConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        check_olmo(config)
        expect(config, "layer_types", None)
        return LlamaConfig.from_hf(config)
