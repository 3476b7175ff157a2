"""The demo model in its training form: a plain Llama decoder in torch.

It works on token ids only, and produces the weights but never serves them. Parameter names are
those of Hugging Face's LlamaModel: with the prefix "model.", `state_dict()` is the checkpoint.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from engine.models.llama import LlamaConfig

# Token ids, and a mask of the tokens that the model learns to generate.
Example = tuple[list[int], list[bool]]
Batch = list[Example]


def rotary_table(config: LlamaConfig) -> Tensor:
    """Return cosines and sines [2, positions, head_dim], with halves repeated ("rotate half")."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    positions = torch.arange(config.max_positions, dtype=torch.float32)
    angles = torch.outer(positions, config.rope_theta**-half).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin()))


def rotate(x_BHTD: Tensor, turns_2TD: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al., 2021) to the last dimension."""
    first, second = x_BHTD.chunk(2, dim=-1)
    return x_BHTD * turns_2TD[0] + torch.cat((-second, first), dim=-1) * turns_2TD[1]


def linears(**sizes: tuple[int, int]) -> nn.ModuleDict:
    return nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})


class DecoderLayer(nn.Module):
    """Causal grouped-query attention and a gated MLP.

    Padding is on the right, where causal attention hides it from real tokens.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        wide, inner, self.head_dim = config.hidden, config.intermediate, config.head_dim
        query, key = config.heads * self.head_dim, config.kv_heads * self.head_dim
        self.self_attn = linears(
            q_proj=(wide, query), k_proj=(wide, key), v_proj=(wide, key), o_proj=(query, wide)
        )
        self.mlp = linears(gate_proj=(wide, inner), up_proj=(wide, inner), down_proj=(inner, wide))
        self.input_layernorm = nn.RMSNorm(wide, config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(wide, config.norm_eps)

    def attend(self, x_BTC: Tensor, turns_2TD: Tensor) -> Tensor:
        query, key, value = (
            self.self_attn[name](x_BTC).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        query, key = rotate(query, turns_2TD) * self.head_dim**-0.5, rotate(key, turns_2TD)
        group = query.shape[1] // key.shape[1]
        # At these short lengths plain products train faster on a CPU than the fused kernel.
        scores_BHTT = query @ key.repeat_interleave(group, dim=1).transpose(-1, -2)
        hidden = torch.ones(scores_BHTT.shape[-2:], dtype=torch.bool, device=query.device).triu(1)
        weights_BHTT = scores_BHTT.masked_fill(hidden, float("-inf")).softmax(-1)
        out = weights_BHTT @ value.repeat_interleave(group, dim=1)
        return self.self_attn["o_proj"](out.transpose(1, 2).flatten(2))

    def forward(self, x_BTC: Tensor, turns_2TD: Tensor) -> Tensor:
        x_BTC = x_BTC + self.attend(self.input_layernorm(x_BTC), turns_2TD)
        normed, mlp = self.post_attention_layernorm(x_BTC), self.mlp
        gated = F.silu(mlp["gate_proj"](normed)) * mlp["up_proj"](normed)
        return x_BTC + mlp["down_proj"](gated)


class DemoModel(nn.Module):
    """A Llama that returns logits at chosen positions; its head is tied to the token embedding."""

    adam_lr = 2e-3

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.register_buffer("turns_2PD", rotary_table(config), persistent=False)
        width, deep = config.hidden**-0.5, (2 * config.layers) ** -0.5
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                scale = deep if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(parameter, std=scale * width)
        # All embeddings drift together early in training; large ones keep their direction. The
        # small gain of the last norm still keeps the first logits near zero.
        nn.init.normal_(self.embed_tokens.weight, std=8 * width)
        nn.init.constant_(self.norm.weight, 1 / 8)

    def checkpoint(self) -> dict[str, Tensor]:
        return {f"model.{name}": parameter for name, parameter in self.state_dict().items()}

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy in nats, summed over the batch's learned tokens."""
        device = self.embed_tokens.weight.device
        ids_BT, learned_BT = (
            pad_sequence([torch.tensor(row) for row in rows], batch_first=True).to(device)
            for rows in zip(*batch, strict=True)
        )
        keep_BT = learned_BT[:, 1:]
        with torch.autocast(device.type, torch.bfloat16):
            logits = self(ids_BT[:, :-1], keep_BT)
        return F.cross_entropy(logits.float(), ids_BT[:, 1:][keep_BT], reduction="sum")

    def forward(self, ids_BT: Tensor, keep_BT: Tensor) -> Tensor:
        """Return logits [N, vocab] at the N positions where `keep_BT` is true."""
        turns_2TD = self.get_buffer("turns_2PD")[:, : ids_BT.shape[1]]
        x_BTC = self.embed_tokens(ids_BT)
        for layer in self.layers:
            x_BTC = layer(x_BTC, turns_2TD)
        return F.linear(self.norm(x_BTC)[keep_BT], self.embed_tokens.weight)
