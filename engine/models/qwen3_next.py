"""Qwen3-Next: gated attention in every fourth layer, gated delta nets in the others, and experts.

The computation is that of transformers' modeling_qwen3_next.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from engine.checkpoint.weight_map import Names, WeightMap
from engine.errors import ConfigError
from engine.layers.gated_delta_net import DeltaShape, GatedDeltaNet
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
        }
        return super(Qwen3NextConfig, cls).from_hf(config, **(facts | own))


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


class GatedLlama(Llama):
    """A model of GatedBlocks. In `q_proj`, the query and the gate of each head are neighbours."""

    block = GatedBlock
    config: Qwen3NextConfig
    ignored_prefixes: ClassVar[Sequence[str]] = ("mtp.",)  # a drafter, which is not served

    def weight_map(self) -> WeightMap:
        plain, heads = super().weight_map(), self.config.heads
        targets = {
            name: replace(target, groups=heads) if ".self_attn.q_proj." in name else target
            for name, target in plain.targets.items()
        }
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
