"""Gemma 4 (transformers' Gemma4Model): sliding and global layers differ in shape.

Values are normed, and global layers may use their keys as values. The last layers may read the KV
of earlier ones. A layer may add an input that it has for each token, and a mixture of experts
next to its MLP. In sliding layers of some checkpoints the tokens of an image see each other both
ways. The audio parts of checkpoints are ignored.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.attention.spec import AttentionSpec
from engine.checkpoint.weight_map import Names, WeightMap, fused_experts, targets_by_module
from engine.layers.attention import Attention
from engine.layers.embedding import LMHead, ScaledTokenEmbedding
from engine.layers.linear import Linear
from engine.layers.mlp import GatedMLP
from engine.layers.norm import Join, PlainRMSNorm, RMSNorm, ScaledJoin
from engine.layers.rotary import RotaryEmbedding
from engine.models.base import required
from engine.models.gemma2 import NAMES_GEMMA2
from engine.models.gemma4_config import Gemma4Config, read_gemma4
from engine.models.gemma4_parts import AddedMixture, PerLayerGate, PerLayerInputs
from engine.models.vision.block import under
from engine.models.vision.gemma4 import PROJECTOR, TOWER, Gemma4Vision
from engine.ops.kernels import Kernels
from engine.ops.rotary import Angles, HeadNorm, apply_rotary
from engine.ops.softcap import softcap

NAMES_GEMMA4 = NAMES_GEMMA2 | {
    "blocks.{i}.end": "model.layers.{i}",
    "blocks.{i}.gate.enter": "model.layers.{i}.per_layer_input_gate",
    "blocks.{i}.gate.leave": "model.layers.{i}.per_layer_projection",
    "blocks.{i}.gate_post_norm": "model.layers.{i}.post_per_layer_input_norm",
    "blocks.{i}.mixture.scales": "model.layers.{i}.router",
    "blocks.{i}.mixture.experts.router": "model.layers.{i}.router.proj",
    "blocks.{i}.mixture.experts.expert_up": "model.layers.{i}.experts.{part}_proj",
    "blocks.{i}.mixture.experts.expert_down": "model.layers.{i}.experts.{part}_proj",
    "blocks.{i}.mixture.dense_norm": "model.layers.{i}.post_feedforward_layernorm_1",
    "blocks.{i}.mixture.norm": "model.layers.{i}.pre_feedforward_layernorm_2",
    "blocks.{i}.mixture.post_norm": "model.layers.{i}.post_feedforward_layernorm_2",
    "per_layer.embed": "model.embed_tokens_per_layer",
    "per_layer.project": "model.per_layer_model_projection",
    "per_layer.norm": "model.per_layer_projection_norm",
}
# Tensors of other parts, and those that transformers drops: the KV of layers without their own.
AUDIO, VISION = ("audio_tower.", "embed_audio."), (TOWER, PROJECTOR)
PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "")
UNUSED_KV = ("k_proj.weight", "v_proj.weight", "k_proj.bias", "v_proj.bias", "k_norm.weight")


class Gemma4Attention(nn.Module):
    """Rotary attention with norms of queries, keys and values, and without a scale.

    A layer that reads the KV of another one has only queries.
    """

    def __init__(self, config: Gemma4Config, index: int) -> None:
        super().__init__()
        c = config
        heads, (kv_heads, head_dim) = c.heads, c.kv_shape(index)
        reads = c.reads[index]
        window = c.windows[index]
        spec = AttentionSpec(
            heads,
            kv_heads,
            head_dim,
            scale=1.0,
            window=window,
            sees_whole_images=c.sees_whole_images and window is not None,
        )
        units = {"q": heads}
        if reads is None:
            units |= {"k": kv_heads} if c.keys_are_values(index) else {"k": kv_heads, "v": kv_heads}
        sizes = {part: count * head_dim for part, count in units.items()}
        self.qkv = Linear(c.hidden, sizes, bias=c.qkv_bias, output_units=units)
        self.q_norm = RMSNorm(head_dim, c.norm_eps)
        self.k_norm = RMSNorm(head_dim, c.norm_eps) if reads is None else None
        self.v_norm = PlainRMSNorm(c.norm_eps)
        self.attend = Attention(spec, index, reads=reads)
        self.out = Linear(sizes["q"], c.hidden, bias=c.out_bias, input_units=heads)
        self.kernels: Kernels = "torch"

    def forward(self, x: torch.Tensor, angles: Angles, batch: ForwardBatch) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]. Where there are no values, they are the raw keys."""
        spec = self.attend.spec
        projected = self.qkv(x).unflatten(1, (-1, spec.head_dim))
        if self.k_norm is None:
            q = apply_rotary(self.q_norm(projected), *angles, kernels=self.kernels)
            return self.out(self.attend(q, None, None, batch))
        qk = projected[:, : spec.num_heads + spec.num_kv_heads]
        v = self.v_norm(projected[:, -spec.num_kv_heads :])
        norm = HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)
        return self.out(self.attend.rotate_and_attend(qk, v, angles, norm, batch))


class Gemma4Block(nn.Module):
    def __init__(self, config: Gemma4Config, index: int) -> None:
        super().__init__()
        c, norm = config, partial(RMSNorm, config.hidden, config.norm_eps)
        self.attention_norm = norm()
        self.attention = Gemma4Attention(c, index)
        self.attention_post_norm = norm()
        self.mlp_norm = norm()
        self.mlp = GatedMLP(c.hidden, c.width(index), c.activation)
        self.mixture = None
        if c.experts is not None:
            self.mixture = AddedMixture(c.hidden, c.experts, c.activation, c.norm_eps)
        self.mlp_post_norm = norm()
        self.gate = None
        if c.per_layer:
            self.middle = Join()
            self.gate = PerLayerGate(c.hidden, c.per_layer, c.activation)
            self.gate_post_norm = norm()
        self.end = ScaledJoin()

    def forward(
        self,
        x: torch.Tensor,
        per_layer: torch.Tensor | None,
        angles: Angles,
        batch: ForwardBatch,
    ) -> torch.Tensor:
        """Return the residual stream [T, hidden], for that of the previous block.

        `per_layer` [T, per-layer size] are the layer's inputs of each token.
        """
        x, normed = self.attention_norm.add(x, None)
        attended = self.attention(normed, angles, batch)
        x, normed = self.mlp_norm.add(x, attended, self.attention_post_norm)
        delta, post = self.mlp(normed), self.mlp_post_norm
        if self.mixture is not None:
            delta = self.mixture(delta, x)
        if self.gate is not None:
            assert per_layer is not None
            x, _ = self.middle.add(x, delta, post)
            delta, post = self.gate(x, per_layer), self.gate_post_norm
        return self.end.add(x, delta, post)[0]


class Gemma4(nn.Module):
    names: ClassVar[Names] = NAMES_GEMMA4

    @staticmethod
    def read_config(config: dict[str, Any]) -> Gemma4Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        return read_gemma4(config)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = c = self.read_config(config)
        self.embed = ScaledTokenEmbedding(
            c.vocab_size, c.hidden, c.embed_scale, dtype, divisible=True
        )
        self.per_layer = None
        if c.per_layer:
            self.per_layer = PerLayerInputs(
                c.vocab_size_per_layer, c.layers, c.per_layer, c.hidden, c.norm_eps, dtype
            )
        self.rotary = RotaryEmbedding(
            c.global_head_dim, c.rope_theta, c.rope_scaling, max_positions, dtype
        )
        self.local_rotary = RotaryEmbedding(
            c.head_dim, c.local_theta, c.local_scaling, max_positions, dtype
        )
        self.blocks = nn.ModuleList(Gemma4Block(c, i) for i in range(c.layers))
        self.norm = RMSNorm(c.hidden, c.norm_eps)
        self.head = LMHead(c.vocab_size, c.hidden, tied_to=self.embed if c.tied else None)
        self.kernels: Kernels = "torch"

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        ids, x = batch.input_ids, self.embed(batch.input_ids)
        if batch.seen is not None:
            x = batch.seen.place(x)
            ids = ids.index_fill(0, batch.seen.index, self.config.pad_token)
        inputs: list[torch.Tensor | None] = [None] * len(self.blocks)
        if self.per_layer is not None:
            inputs[:] = self.per_layer(ids, x).unbind(1)
        everywhere, nearby = self.rotary(batch.positions), self.local_rotary(batch.positions)
        layers = zip(self.blocks, inputs, self.config.windows, strict=True)
        for block, per_layer, window in layers:
            x = block(x, per_layer, everywhere if window is None else nearby, batch)
        return self.norm.add(x, None)[1]

    def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        logits, cap = self.head(hidden, out), self.config.final_softcap
        return logits if cap is None else softcap(logits, cap, out, kernels=self.kernels)

    def weight_map(self) -> WeightMap:
        """Return the WeightMap. A multimodal checkpoint has further prefixes, and other parts."""
        c = self.config
        targets = targets_by_module(self, self.names)
        fused = {}
        if c.experts is not None:
            experts = "blocks.{i}.mixture.experts", "layers.{i}.experts"
            fused = fused_experts(*experts, c.layers, c.experts.count)
        others = [prefix + part for prefix in ("", "model.") for part in (*AUDIO, *VISION)]
        readers = [index for index, reads in enumerate(c.reads) if reads is not None]
        return WeightMap(
            {name.removeprefix("model."): target for name, target in targets.items()},
            prefixes=PREFIXES if c.nested else ("model.", ""),
            fused=fused,
            aliases={"embed_tokens.weight": ("lm_head.weight",)} if c.tied else {},
            ignored=[f"layers.{i}.self_attn.{name}" for i in readers for name in UNUSED_KV],
            ignored_prefixes=others if c.nested else (),
        )


class SeeingGemma4(Gemma4):
    names: ClassVar[Names] = NAMES_GEMMA4 | under(Gemma4Vision.names, "vision.", "")

    @staticmethod
    def read_config(config: dict[str, Any]) -> Gemma4Config:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        required(config, "text_config")
        required(config, "vision_config")
        return read_gemma4(config)

    def __init__(self, config: dict[str, Any], *, max_positions: int, dtype: torch.dtype) -> None:
        super().__init__(config, max_positions=max_positions, dtype=dtype)
        assert self.config.vision is not None
        self.vision = Gemma4Vision(self.config.vision, dtype=dtype)

    @property
    def image_tokens(self) -> int:
        return self.vision.config.budget if self.config.sees_whole_images else 0

    def weight_map(self) -> WeightMap:
        """Return the WeightMap, with whole names: those of both halves begin differently."""
        text = super().weight_map()
        aliases = {}
        for name in (*text.targets, *text.fused):
            copies = [each for alias in text.aliases.get(name, ()) for each in spellings(alias)]
            aliases[spellings(name)[0]] = [*spellings(name)[1:], *copies]
        return WeightMap(
            {spellings(name)[0]: target for name, target in text.targets.items()},
            aliases=aliases,
            fused={spellings(name)[0]: target for name, target in text.fused.items()},
            ignored=text.ignored,
            ignored_prefixes=[prefix + part for prefix in ("", "model.") for part in AUDIO],
        )


def spellings(name: str) -> list[str]:
    """Return the names that files have for a tensor: the newest first, from one without prefix."""
    if name.startswith(VISION):
        return ["model." + name, name]
    found = [prefix + name for prefix in PREFIXES]
    return found[::-1] if name == "lm_head.weight" else found
