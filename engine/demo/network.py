"""The training form of the demo model: a plain Llama decoder in torch.

It knows tensors only: no text, no files. Parameter names are those of Hugging Face's
LlamaForCausalLM, so `state_dict()` is the checkpoint. It is used to make the weights and never
to serve them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class DemoConfig:
    """Sizes of the demo model; the names are those of a Llama config.json."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 512
    num_hidden_layers: int = 4
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5


def rotary_table(config: DemoConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines [max_position_embeddings, head_dim], halves repeated ("rotate half")."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    positions = torch.arange(config.max_position_embeddings, dtype=torch.float32)
    angles = torch.outer(positions, config.rope_theta**-half).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotate(x_BHTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Rotary position embedding (Su et al., 2021) on the last dimension."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * cos_TD + torch.cat((-second, first), dim=-1) * sin_TD


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))  # [size]
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention over right-padded rows: no real token sees padding."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x_BTC: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        def heads(projected: Tensor) -> Tensor:
            return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

        query = rotate(heads(self.q_proj(x_BTC)), cos_TD, sin_TD) * self.head_dim**-0.5
        key = rotate(heads(self.k_proj(x_BTC)), cos_TD, sin_TD)
        value = heads(self.v_proj(x_BTC))
        group = query.shape[1] // key.shape[1]
        # Plain products: at these short lengths they train faster on a CPU than the fused kernel.
        scores_BHTT = query @ key.repeat_interleave(group, dim=1).transpose(-1, -2)
        hidden = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        weights_BHTT = scores_BHTT.masked_fill(hidden, float("-inf")).softmax(-1)
        out = weights_BHTT @ value.repeat_interleave(group, dim=1)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos_TD, sin_TD)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        cos_PD, sin_PD = rotary_table(config)
        self.register_buffer("cos_PD", cos_PD, persistent=False)
        self.register_buffer("sin_PD", sin_PD, persistent=False)

    def forward(self, ids_BT: Tensor) -> Tensor:
        cos_PD, sin_PD = self.get_buffer("cos_PD"), self.get_buffer("sin_PD")
        length = ids_BT.shape[1]
        x = self.embed_tokens(ids_BT)
        for layer in self.layers:
            x = layer(x, cos_PD[:length], sin_PD[:length])
        return self.norm(x)


class DemoModel(nn.Module):
    """Logits at chosen positions; the output layer is the embedding (tied)."""

    def __init__(self, config: DemoConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        width, deep = config.hidden_size**-0.5, (2 * config.num_hidden_layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = deep if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=scale * width)
        # Long embeddings keep their direction while all of them drift together early in training;
        # the last norm's small gain keeps the first logits near zero all the same.
        nn.init.normal_(self.model.embed_tokens.weight, std=8 * width)
        nn.init.constant_(self.model.norm.weight, 1 / 8)

    def forward(self, ids_BT: Tensor, keep_BT: Tensor) -> Tensor:
        """Logits [N, vocab] at the N places where `keep_BT` is true."""
        return F.linear(self.model(ids_BT)[keep_BT], self.model.embed_tokens.weight)
