"""The demo model in its training form: a plain Llama decoder in torch.

It works on token ids only, and produces the weights but never serves them. Parameter names are
those of Hugging Face's LlamaModel: with the prefix "model.", `state_dict()` is the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from engine.models.llama import LlamaConfig

# Up to this length, plain products train faster on a CPU than the fused kernel. Their scores take
# memory that grows with the square of the length.
PLAIN_LENGTH = 1024


class Example(NamedTuple):
    ids: list[int]
    learned: list[bool]  # whether the model learns to generate the token
    pictures: tuple[bytes, ...] = ()  # uint8 [side, side, 3] each, as the model sees them


Batch = list[Example]


def rotary_frequencies(config: LlamaConfig) -> Tensor:
    """Return the angles per position [head_dim / 2], with Llama 3.1's scaling if there is one.

    Frequencies that turn at most `low_freq_factor` times in the original context are divided by the
    factor, and those that turn `high_freq_factor` times stay. Others are blended.
    """
    dimensions = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    frequencies = config.rope_theta ** -(dimensions / config.head_dim)
    scaling = config.rope_scaling
    if scaling.kind == "default":
        return frequencies
    turns = scaling.original_max_positions * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return kept * frequencies + (1 - kept) * frequencies / scaling.factor


def rotary_table(config: LlamaConfig) -> Tensor:
    """Return cosines and sines [2, positions, head_dim], with halves repeated ("rotate half")."""
    frequencies = rotary_frequencies(config)
    positions = torch.arange(config.max_positions, dtype=torch.float32)
    angles = torch.outer(positions, frequencies).repeat(1, 2)
    cosines = angles.cos()
    sines = angles.sin()
    return torch.stack((cosines, sines))


def rotate(x_BHTD: Tensor, turns_2TD: Tensor) -> Tensor:
    """Apply rotary position embedding (Su et al., 2021) to the last dimension."""
    cosines_TD, sines_TD = turns_2TD
    first, second = x_BHTD.chunk(2, dim=-1)
    turned_BHTD = torch.cat((-second, first), dim=-1)
    return x_BHTD * cosines_TD + turned_BHTD * sines_TD


def future_mask(scores_BHTT: Tensor) -> Tensor:
    """Return a mask [T, T] of the keys that come after each query."""
    size = scores_BHTT.shape[-2:]
    ones_TT = torch.ones(size, dtype=torch.bool, device=scores_BHTT.device)
    return ones_TT.triu(1)


def attend_plainly(query_BHTD: Tensor, key_BHTD: Tensor, value_BHTD: Tensor) -> Tensor:
    """Return causal attention from plain products. The queries are scaled already."""
    scores_BHTT = query_BHTD @ key_BHTD.transpose(-1, -2)
    hidden_TT = future_mask(scores_BHTT)
    scores_BHTT = scores_BHTT.masked_fill(hidden_TT, float("-inf"))
    weights_BHTT = scores_BHTT.softmax(-1)
    return weights_BHTT @ value_BHTD


def linears(bias: bool = False, **sizes: tuple[int, int]) -> nn.ModuleDict:
    """Return linear layers, without biases by default; each size is (inputs, outputs)."""
    layers = nn.ModuleDict()
    for name, (inputs, outputs) in sizes.items():
        layers[name] = nn.Linear(inputs, outputs, bias=bias)
    return layers


def padded(rows: Sequence[Sequence[int]], padding: int = 0) -> Tensor:
    """Return rows of different lengths as one tensor [B, T], padded on the right."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=padding)


class DecoderLayer(nn.Module):
    """Causal grouped-query attention and a gated MLP.

    Padding is on the right, where causal attention hides it from real tokens.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden = config.hidden
        inner = config.intermediate
        query_size = config.heads * config.head_dim
        key_size = config.kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.group = config.heads // config.kv_heads  # query heads per key head
        self.self_attn = linears(
            q_proj=(hidden, query_size),
            k_proj=(hidden, key_size),
            v_proj=(hidden, key_size),
            o_proj=(query_size, hidden),
        )
        self.mlp = linears(
            gate_proj=(hidden, inner),
            up_proj=(hidden, inner),
            down_proj=(inner, hidden),
        )
        self.input_layernorm = nn.RMSNorm(hidden, config.norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(hidden, config.norm_eps)

    def forward(self, x_BTC: Tensor, turns_2TD: Tensor) -> Tensor:
        normed = self.input_layernorm(x_BTC)
        x_BTC = x_BTC + self.attend(normed, turns_2TD)
        normed = self.post_attention_layernorm(x_BTC)
        return x_BTC + self.feed_forward(normed)

    def attend(self, x_BTC: Tensor, turns_2TD: Tensor) -> Tensor:
        query_BHTD = self.split_heads("q_proj", x_BTC)
        key_BGTD = self.split_heads("k_proj", x_BTC)
        value_BGTD = self.split_heads("v_proj", x_BTC)
        scale = self.head_dim**-0.5
        query_BHTD = rotate(query_BHTD, turns_2TD) * scale
        key_BGTD = rotate(key_BGTD, turns_2TD)
        key_BHTD = key_BGTD.repeat_interleave(self.group, dim=1)
        value_BHTD = value_BGTD.repeat_interleave(self.group, dim=1)
        if x_BTC.shape[1] <= PLAIN_LENGTH:
            out_BHTD = attend_plainly(query_BHTD, key_BHTD, value_BHTD)
        else:
            out_BHTD = F.scaled_dot_product_attention(
                query_BHTD, key_BHTD, value_BHTD, is_causal=True, scale=1.0
            )
        out_BTC = out_BHTD.transpose(1, 2).flatten(2)
        return self.self_attn["o_proj"](out_BTC)

    def split_heads(self, name: str, x_BTC: Tensor) -> Tensor:
        """Project with one of the layers of `self_attn` to [B, heads, T, head_dim]."""
        projected = self.self_attn[name](x_BTC)
        heads_BTHD = projected.unflatten(-1, (-1, self.head_dim))
        return heads_BTHD.transpose(1, 2)

    def feed_forward(self, x_BTC: Tensor) -> Tensor:
        gate = F.silu(self.mlp["gate_proj"](x_BTC))
        gated = gate * self.mlp["up_proj"](x_BTC)
        return self.mlp["down_proj"](gated)


class DemoModel(nn.Module):
    """A Llama that returns logits at chosen positions; its head is tied to the token embedding."""

    adam_lr = 2e-3

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden)
        self.layers = nn.ModuleList()
        for _ in range(config.layers):
            self.layers.append(DecoderLayer(config))
        self.norm = nn.RMSNorm(config.hidden, config.norm_eps)
        self.register_buffer("turns_2PD", rotary_table(config), persistent=False)
        self.draw_weights(config)

    def draw_weights(self, config: LlamaConfig) -> None:
        """Draw the initial weights. A layer's outputs are smaller in a deeper model."""
        std = config.hidden**-0.5
        sublayers = 2 * config.layers
        output_std = sublayers**-0.5 * std
        for name, parameter in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.normal_(parameter, std=output_std)
            elif parameter.dim() == 2:
                nn.init.normal_(parameter, std=std)
        # All embeddings drift together early in training; large ones keep their direction. The
        # small gain of the last norm still keeps the first logits near zero.
        nn.init.normal_(self.embed_tokens.weight, std=8 * std)
        nn.init.constant_(self.norm.weight, 1 / 8)

    def checkpoint(self) -> dict[str, Tensor]:
        """Return the weights under their names in a Hugging Face checkpoint."""
        weights = {}
        for name, weight in self.state_dict().items():
            weights[f"model.{name}"] = weight
        return weights

    def loss(self, batch: Batch) -> Tensor:
        """Return the cross-entropy in nats, summed over the batch's learned tokens."""
        device = self.embed_tokens.weight.device
        ids_BT = padded([example.ids for example in batch]).to(device)
        return self.loss_of(batch, ids_BT, self.embed_tokens(ids_BT))

    def loss_of(self, batch: Batch, ids_BT: Tensor, x_BTC: Tensor) -> Tensor:
        """Return the same with the embeddings of the batch's tokens given."""
        device = ids_BT.device
        learned_BT = padded([example.learned for example in batch]).to(device)
        keep_BT = learned_BT[:, 1:]
        targets_N = ids_BT[:, 1:][keep_BT]
        with torch.autocast(device.type, torch.bfloat16):
            logits = self.decode(x_BTC[:, :-1], keep_BT)
        return F.cross_entropy(logits.float(), targets_N, reduction="sum")

    def forward(self, ids_BT: Tensor, keep_BT: Tensor) -> Tensor:
        """Return logits [N, vocab] at the N positions where `keep_BT` is true."""
        return self.decode(self.embed_tokens(ids_BT), keep_BT)

    def decode(self, x_BTC: Tensor, keep_BT: Tensor) -> Tensor:
        """Return the same for the embeddings of tokens."""
        length = x_BTC.shape[1]
        turns_2TD = self.get_buffer("turns_2PD")[:, :length]
        for layer in self.layers:
            x_BTC = layer(x_BTC, turns_2TD)
        x_NC = self.norm(x_BTC)[keep_BT]
        return F.linear(x_NC, self.embed_tokens.weight)
