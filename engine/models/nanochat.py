"""nanochat (github.com/karpathy/nanochat), every generation from 2025-10 to 2026-07.

All generations have norms without weights, also directly after the token embedding. Queries and
keys are rotated by minus theta and then normed. The activation is squared ReLU; logits are capped.

Later generations add windows, a factor on q and k, residual scalars, value embeddings, smear and
backout. `penstock import nanochat` writes these settings into config.json. A config written by
transformers has none of them: it belongs to the first generation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec
from engine.checkpoint.weight_map import WeightMap, targets_by_module
from engine.errors import ConfigError
from engine.layers.attention import Attention
from engine.layers.embedding import LMHead, TokenEmbedding
from engine.layers.linear import Linear
from engine.layers.mlp import MLP
from engine.layers.norm import Join, PlainRMSNorm
from engine.layers.rotary import RopeScaling, RotaryEmbedding, rope_theta
from engine.layers.state import LayerState, StatePart
from engine.models.base import (
    attention_heads,
    expect,
    layer_count,
    nullable,
    positive,
    positive_float,
    required,
)
from engine.ops.causal_conv import causal_conv
from engine.ops.gated import relu_squared, sigmoid
from engine.ops.kernels import Kernels
from engine.ops.norm import rms_norm
from engine.ops.rotary import HeadNorm
from engine.ops.softcap import softcap

# Our module name -> its name in a checkpoint.
NAMES = {
    "embed": "model.embed_tokens",
    "blocks.{i}.attention.qkv": "model.layers.{i}.self_attn.{part}_proj",
    "blocks.{i}.attention.out": "model.layers.{i}.self_attn.o_proj",
    "blocks.{i}.attention.values.gate": "model.layers.{i}.self_attn.ve_gate",
    "blocks.{i}.attention.values.table": "model.value_embeds.{i}",
    "blocks.{i}.mlp.up": "model.layers.{i}.mlp.fc1",
    "blocks.{i}.mlp.down": "model.layers.{i}.mlp.fc2",
    "smear_gate": "model.smear_gate",
    "head": "lm_head",
    "": "model",  # scalars of NanoChat itself
}


@dataclass(frozen=True, slots=True)
class NanoChatConfig:
    """The config of a nanochat checkpoint; None marks a feature that its generation lacks."""

    vocab_size: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float  # upstream uses the machine epsilon of the training dtype
    rope_theta: float
    rope_scaling: RopeScaling
    softcap: float | None
    qk_scale: float  # factor on q and on k, after their norm
    windows: tuple[int | None, ...]  # keys that a query of each layer sees, its own included
    residual_lambdas: bool  # x = resid_lambda * x + x0_lambda * x0 before every block
    value_layers: tuple[int, ...]  # layers with a value embedding
    gate_channels: int  # input channels that the value gates read
    gate_range: float  # upper limit of the value gates
    smear_channels: int | None  # input channels that the smear gate reads
    backout_layer: int | None  # its output is subtracted before the last norm

    @classmethod
    def from_hf(cls, config: dict[str, Any]) -> NanoChatConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        expect(config, "hidden_act", "relu2")
        expect(config, "attention_bias", False)
        expect(config, "tie_word_embeddings", False)
        layers = layer_count(config)
        config = _complete(config, layers)
        expect(config, "residual_lambdas", True, False)
        expect(config, "backout_layer", None, *range(layers))
        heads, kv_heads, head_dim = attention_heads(config)
        value_layers = _each(config, "value_layers", lambda i: type(i) is int and 0 <= i < layers)
        windows = _each(config, "layer_windows", lambda w: w is None or (type(w) is int and w > 0))
        if len(windows) != layers:
            raise ConfigError(
                f"config.json has {len(windows)} layer_windows for {layers} layers; give one each."
            )
        return cls(
            vocab_size=positive(config, "vocab_size"),
            hidden=positive(config, "hidden_size"),
            intermediate=positive(config, "intermediate_size"),
            layers=layers,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_positions=positive(config, "max_position_embeddings"),
            norm_eps=positive_float(config, "rms_norm_eps"),
            rope_theta=positive_float(config, "rope_theta"),
            rope_scaling=RopeScaling.from_hf(config),
            softcap=nullable(config, "final_logit_softcapping", positive_float),
            qk_scale=positive_float(config, "qk_scale"),
            windows=windows,
            residual_lambdas=required(config, "residual_lambdas"),
            value_layers=value_layers,
            gate_channels=positive(config, "value_gate_channels") if value_layers else 0,
            gate_range=positive_float(config, "value_gate_range") if value_layers else 0.0,
            smear_channels=nullable(config, "smear_channels", positive),
            backout_layer=nullable(config, "backout_layer", required),
        )


def _complete(config: dict[str, Any], layers: int) -> dict[str, Any]:
    """Add the settings that transformers' configs, always of the first generation, omit.

    A config with any of these keys must have all of them: a guessed value could be wrong.
    """
    first = {"qk_scale": 1.0, "layer_windows": [None] * layers, "residual_lambdas": False}
    first |= {"value_layers": [], "smear_channels": None, "backout_layer": None}
    if not config.keys().isdisjoint(first):
        return config
    return {"final_logit_softcapping": 15.0, **config, **first, "rope_theta": rope_theta(config)}


def _each(config: dict[str, Any], key: str, allowed: Callable[[Any], bool]) -> tuple[Any, ...]:
    """Return the list config[key]. Raises ConfigError if it, or one of its items, is not valid."""
    value = required(config, key)
    if not isinstance(value, list) or not all(map(allowed, value)):
        raise ConfigError(
            f"config.json has {key} = {value!r}; it must be a list, see docs/importing.md."
        )
    return tuple(value)


class ValueEmbedding(nn.Module):
    """A second token embedding, added to the values through one gate per KV head.

    Source: ResFormer, arXiv 2410.17897.
    """

    def __init__(self, config: NanoChatConfig) -> None:
        super().__init__()
        self.gate_channels, self.gate_range = config.gate_channels, config.gate_range
        heads = config.kv_heads
        self.gate = Linear(config.gate_channels, heads, output_units={"": heads})
        self.table = TokenEmbedding(config.vocab_size, heads * config.head_dim, column_units=heads)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return gated embeddings [T, kv_heads, head_dim] for x [T, hidden] and ids [T]."""
        gates = sigmoid(self.gate(x[:, : self.gate_channels])) * self.gate_range
        return gates.unsqueeze(-1) * self.table(ids).view(*gates.shape, -1)


class NanoChatAttention(nn.Module):
    def __init__(self, config: NanoChatConfig, index: int) -> None:
        super().__init__()
        c, dim = config, config.head_dim
        scale = c.qk_scale**2 * dim**-0.5  # q and k each have the factor
        spec = AttentionSpec(c.heads, c.kv_heads, dim, scale=scale, window=c.windows[index])
        self.norm_eps = c.norm_eps
        sizes = {"q": c.heads * dim, "k": c.kv_heads * dim, "v": c.kv_heads * dim}
        units = {"q": c.heads, "k": c.kv_heads, "v": c.kv_heads}
        self.qkv = Linear(c.hidden, sizes, output_units=units)
        self.values = ValueEmbedding(c) if index in c.value_layers else None
        self.attend = Attention(spec, index)
        self.out = Linear(c.heads * dim, c.hidden, input_units=c.heads)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        spec = self.attend.spec
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = self.qkv(x).view(len(x), heads + 2 * kv_heads, spec.head_dim)
        qk, v = qkv.split([heads + kv_heads, kv_heads], dim=1)
        if self.values is not None:
            v = v + self.values(x, batch.input_ids)
        norm = HeadNorm(None, None, self.norm_eps, after=True)
        return self.out(self.attend.rotate_and_attend(qk, v, (cos, sin), norm, batch))


class NanoChatBlock(nn.Module):
    def __init__(self, config: NanoChatConfig, index: int) -> None:
        super().__init__()
        self.attention_norm = PlainRMSNorm(config.norm_eps)
        self.attention = NanoChatAttention(config, index)
        self.mlp_norm = PlainRMSNorm(config.norm_eps)
        self.mlp = MLP(config.hidden, config.intermediate, relu_squared)
        self.join = Join()

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, batch: ForwardBatch
    ) -> torch.Tensor:
        x, normed = self.attention_norm.add(x, None)
        x, normed = self.mlp_norm.add(x, self.attention(normed, cos, sin, batch))
        return self.join.add(x, self.mlp(normed))[0]


class NanoChat(nn.Module):
    @staticmethod
    def read_config(config: dict[str, Any]) -> NanoChatConfig:
        return NanoChatConfig.from_hf(config)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = self.read_config(config)
        self.embed = TokenEmbedding(c.vocab_size, c.hidden, divisible=True)
        if c.smear_channels is not None:
            self.smear_gate = Linear(c.smear_channels, 1)
            self.smear_lambda = nn.Parameter(torch.empty(1))
            # The state is the last token's embedding. A convolution with these taps returns it.
            self.smear_state = LayerState(
                0, StatePart((1, c.hidden)), divides=False, replaces_attention=False
            )
            taps = torch.tensor([1.0, 0.0], dtype=dtype, device="cpu").repeat(c.hidden, 1)
            self.smear_taps = nn.Buffer(taps, persistent=False)
        self.rotary = RotaryEmbedding(
            c.head_dim, c.rope_theta, c.rope_scaling, max_positions, dtype
        )
        if c.residual_lambdas:
            self.resid_lambdas = nn.Parameter(torch.empty(c.layers))
            self.x0_lambdas = nn.Parameter(torch.empty(c.layers))
        self.blocks = nn.ModuleList(NanoChatBlock(c, i) for i in range(c.layers))
        if c.backout_layer is not None:
            self.backout_lambda = nn.Parameter(torch.empty(1))
        self.norm = PlainRMSNorm(c.norm_eps)
        self.head = LMHead(c.vocab_size, c.hidden)
        self.kernels: Kernels = "torch"

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        c = self.config
        x = rms_norm(self.embed(batch.input_ids), None, c.norm_eps, kernels=self.kernels)
        if c.smear_channels is not None:
            x = self.smear(x, batch)
        first = x
        cos, sin = self.rotary(batch.positions)
        sin = -sin  # rotate by minus theta
        for i, block in enumerate(self.blocks):
            if c.residual_lambdas:
                x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * first
            x = block(x, cos, sin, batch)
            if i == c.backout_layer:
                backout = x
        if c.backout_layer is not None:
            x = x - self.backout_lambda * backout
        return self.norm.add(x, None)[1]

    def smear(self, x: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Add the previous token's embedding to each token, through a gate. Position 0 has none."""
        (tails,), runs = self.smear_state(batch)
        taps, kernels = self.smear_taps, self.kernels
        previous = causal_conv(x, taps, None, tails, runs, silu=False, kernels=kernels)
        gates = self.smear_lambda * sigmoid(self.smear_gate(x[:, : self.config.smear_channels]))
        return x + gates * previous

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits, cap = self.head(hidden, out), self.config.softcap
        return logits if cap is None else softcap(logits, cap, out, kernels=self.kernels)

    def weight_map(self) -> WeightMap:
        return WeightMap(targets_by_module(self, NAMES))
