"""Qwen3-Next: gated attention in every fourth layer, gated delta nets in the others, and experts.

The computation is that of transformers' modeling_qwen3_next.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
from torch import nn

from engine.attention.batch import ForwardBatch
from engine.checkpoint.weight_map import (
    Names,
    Target,
    WeightMap,
    fused_experts,
    targets_by_module,
)
from engine.errors import ConfigError
from engine.layers.gated_delta_net import DeltaShape, GatedDeltaNet
from engine.layers.linear import Linear
from engine.layers.norm import OffsetRMSNorm
from engine.layers.rotary import RopeScaling
from engine.models.base import (
    conv_width,
    expect,
    layer_count,
    layer_kinds,
    positive,
    with_attention,
)
from engine.models.hybrid import ATTENDS, RECURS, HybridBlock
from engine.models.llama import Llama, LlamaConfig, llama_mlp
from engine.models.qwen2_moe import Qwen2Moe, experts_with_shared
from engine.models.qwen3_moe import dense_layers

PERIOD = 4  # of the attention layers, if config.json does not say it
PREDICTION_LAYERS, PREDICTION_EMBEDS = "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"
ROTARY_SHARE = 0.25  # if config.json has no partial_rotary_factor
ATTENTION = "model.layers.{i}.self_attn."
DELTA = "model.layers.{i}.linear_attn."
QUERIES = dict.fromkeys(("q", "gate"), ATTENTION + "q_proj")
GATED_NAMES: dict[str, str | Mapping[str, str]] = {
    **Qwen2Moe.names,
    "blocks.{i}.attention.qkv": QUERIES | {part: f"{ATTENTION}{part}_proj" for part in "kv"},
    "blocks.{i}.recurrent": DELTA.removesuffix("."),
    "blocks.{i}.recurrent.conv": DELTA + "conv1d",
    "blocks.{i}.recurrent.norm": DELTA + "norm",
    "blocks.{i}.recurrent.out": DELTA + "out_proj",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3NextConfig(LlamaConfig):
    kinds: tuple[str, ...]  # ATTENDS or RECURS, one per layer
    delta: DeltaShape
    # Of the prediction head: layers, 0 if config.json names none; whether it has an own embedding.
    prediction_layers: int
    prediction_embeds: bool

    @classmethod
    def from_hf(cls, config: dict[str, Any], **own: Any) -> Self:
        # The reference takes the activation of the convolution from it, too.
        expect(config, "hidden_act", "silu")
        expect(config, "attn_output_gate", None, True)  # the reference ignores it
        layers = layer_count(config)
        period = positive(config, "full_attention_interval", PERIOD)
        kinds = [RECURS if (index + 1) % period else ATTENDS for index in range(layers)]
        config = {"partial_rotary_factor": ROTARY_SHARE} | config
        facts = {
            "rope_scaling": RopeScaling.from_hf(config, partial=True),
            "qk_norm": True,
            "norm": OffsetRMSNorm,
            "gates_attention": True,
            "kinds": with_attention(layer_kinds(config, kinds, (ATTENDS, RECURS)), ATTENDS),
            "delta": _delta_shape(config),
            "prediction_layers": _prediction_layers(config),
            "prediction_embeds": bool(config.get(PREDICTION_EMBEDS)),
        }
        return super(Qwen3NextConfig, cls).from_hf(config, **(facts | own))


def _prediction_layers(config: dict[str, Any]) -> int:
    return layer_count(config, PREDICTION_LAYERS) if config.get(PREDICTION_LAYERS) else 0


def _delta_shape(config: dict[str, Any]) -> DeltaShape:
    keys = positive(config, "linear_num_key_heads", 16)
    values = positive(config, "linear_num_value_heads", 32)
    if values % keys:
        raise ConfigError(
            f"config.json has linear_num_value_heads {values}, which is not a multiple of "
            f"linear_num_key_heads {keys}."
        )
    return DeltaShape(
        key_heads=keys,
        value_heads=values,
        key_dim=positive(config, "linear_key_head_dim", 128),
        value_dim=positive(config, "linear_value_head_dim", 128),
        conv_width=conv_width(config, "linear_conv_kernel_dim", 4),
    )


class GatedBlock(HybridBlock):
    def __init__(self, config: Qwen3NextConfig, index: int) -> None:
        c = config

        def delta_net(number: int) -> GatedDeltaNet:
            return GatedDeltaNet(c.hidden, c.delta, number, c.norm_eps)

        super().__init__(c, c.kinds, index, delta_net, llama_mlp(c, index))


class PredictionHead(nn.Module):
    """Multi-token prediction (arXiv 2412.19437): one attending block, which drafts one token more.

    Its input at position p is the model's hidden state there and the token at p + 1. It predicts
    the token at p + 2. Behind that it reads its own hidden states in place of the model's. Token
    embedding, rotary embedding and head are those of `model`. Its KV is that of the layer behind
    the model's attention layers.
    """

    def __init__(self, model: GatedLlama) -> None:
        super().__init__()
        self._model = [model]  # a list, so that it is not a submodule
        c = model.config
        last = c.layers
        # The config of a model with one more layer.
        deeper = replace(
            c,
            layers=last + 1,
            kinds=(*c.kinds, ATTENDS),
            windows=(*c.windows, None),
            rotates=(*c.rotates, True),
        )
        self.embedding_norm = c.norm(c.hidden, c.norm_eps)
        self.hidden_norm = c.norm(c.hidden, c.norm_eps)
        self.join = Linear(2 * c.hidden, c.hidden)
        self.blocks = nn.ModuleList([GatedBlock(deeper, last)])
        self.norm = c.norm(c.hidden, c.norm_eps)

    def forward(self, ids: torch.Tensor, hidden: torch.Tensor, batch: ForwardBatch) -> torch.Tensor:
        """Return hidden states [T, hidden], whose logits predict the tokens behind `ids`.

        `ids` [T] are the tokens behind those of the batch, and `hidden` [T, hidden] the hidden
        states of the batch's positions, after the final norm.
        """
        (model,) = self._model
        parts = self.embedding_norm(model.embed(ids)), self.hidden_norm(hidden)
        cos, sin = model.rotary(batch.positions)
        x, delta = self.blocks[0](self.join(torch.cat(parts, dim=1)), None, cos, sin, batch)
        return self.norm.add(x, delta)[1]

    def weight_map(self) -> WeightMap:
        """Return the WeightMap. All tensors of the model itself are ignored."""
        (model,) = self._model
        names: dict[str, str | Mapping[str, str]] = {
            "embedding_norm": "mtp.pre_fc_norm_embedding",
            "hidden_norm": "mtp.pre_fc_norm_hidden",
            "join": "mtp.fc",
            "norm": "mtp.norm",
        }
        for ours, theirs in model.names.items():
            if ours.startswith("blocks."):
                names[ours] = _of_head(theirs)
        targets = gated_targets(targets_by_module(self, names), model.config.heads)
        fused: Mapping[str, Target] = {}
        if model.config.experts is not None:
            names_of_experts = "blocks.{i}.mlp", "mtp.layers.{i}.mlp.experts"
            fused = fused_experts(*names_of_experts, 1, model.config.experts.count)
        return WeightMap(targets, prefixes=("", "model."), fused=fused, ignored_prefixes=("",))


def _of_head(names: str | Mapping[str, str]) -> str | Mapping[str, str]:
    """Return the names of a layer's tensors in the prediction head."""
    if isinstance(names, str):
        return names.replace("model.layers.", "mtp.layers.")
    return {part: name.replace("model.layers.", "mtp.layers.") for part, name in names.items()}


def gated_targets(targets: Mapping[str, Target], heads: int) -> dict[str, Target]:
    """Return the targets, with query and gate of each head as neighbours in `q_proj`."""
    return {
        name: replace(target, groups=heads) if ".self_attn.q_proj." in name else target
        for name, target in targets.items()
    }


class GatedLlama(Llama):
    """A model of GatedBlocks."""

    block = GatedBlock
    config: Qwen3NextConfig
    ignored_prefixes: ClassVar[Sequence[str]] = ("mtp.",)  # of the prediction head

    @property
    def names_head(self) -> bool:
        return self.config.prediction_layers > 0

    def prediction_head(self) -> PredictionHead:
        """Return a new head. Raises ConfigError if config.json describes one of another kind."""
        layers = self.config.prediction_layers
        if layers > 1:
            raise ConfigError(f"config.json has {PREDICTION_LAYERS} = {layers}; 1 is served.")
        if self.config.prediction_embeds:
            raise ConfigError(f"config.json has {PREDICTION_EMBEDS} = True; false is served.")
        return PredictionHead(self)

    def weight_map(self) -> WeightMap:
        plain = super().weight_map()
        targets = gated_targets(plain.targets, self.config.heads)
        return replace(plain, targets=targets, ignored_prefixes=self.ignored_prefixes)


class Qwen3Next(GatedLlama):
    names: ClassVar[Names] = GATED_NAMES | {
        "blocks.{i}.recurrent.inputs": DELTA + "in_proj_qkvz",
        "blocks.{i}.recurrent.rates": DELTA + "in_proj_ba",
    }

    @staticmethod
    def read_config(config: dict[str, Any]) -> Qwen3NextConfig:
        renormalises = bool(config.get("norm_topk_prob", True))
        return Qwen3NextConfig.from_hf(
            config,
            experts=experts_with_shared(config, renormalises=renormalises),
            dense_layers=dense_layers(config, layer_count(config)),
        )

    def weight_map(self) -> WeightMap:
        """Return the WeightMap. A group of an input projection is a key head with its values."""
        plain, groups = super().weight_map(), self.config.delta.key_heads
        fused = (".in_proj_qkvz.", ".in_proj_ba.")
        targets = {
            name: replace(target, groups=groups) if any(f in name for f in fused) else target
            for name, target in plain.targets.items()
        }
        return replace(plain, targets=targets)
