"""Granite 4 (IBM): Granite with Mamba-2 in most layers, dense or with a mixture of experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from engine.checkpoint.weight_map import WeightMap
from engine.errors import ConfigError
from engine.layers.experts import ExpertsShape, SharedExpert
from engine.layers.mamba2 import Mamba2, Mamba2Shape
from engine.models.base import (
    conv_width,
    expect,
    experts_per_token,
    layer_count,
    layer_kinds,
    positive,
    positive_float,
    with_attention,
)
from engine.models.granite import Granite, GraniteConfig, granite_fields
from engine.models.granite_moe import EXPERTS, with_stacked_experts
from engine.models.hybrid import ATTENDS, RECURS, HybridBlock
from engine.models.llama import NAMES, llama_mlp

KINDS = {"attention": ATTENDS, "mamba": RECURS}  # in published checkpoints
# transformers clamps time steps when several tokens come, and does not when one comes.
UNLIMITED = ([0.0, math.inf], (0.0, math.inf), [0.0, {"__float__": "Infinity"}])


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteHybridConfig(GraniteConfig):
    kinds: tuple[str, ...]  # ATTENDS or RECURS, one per layer
    mamba: Mamba2Shape


class GraniteHybridBlock(HybridBlock):
    def __init__(self, config: GraniteHybridConfig, index: int) -> None:
        super().__init__(
            config,
            config.kinds,
            index,
            partial(Mamba2, config.hidden, config.mamba),
            llama_mlp(config, index),
            scale=config.scale,
            residual_scale=config.residual_scale,
        )


class GraniteHybrid(Granite):
    block = GraniteHybridBlock
    names: ClassVar[Mapping[str, str]] = NAMES | {
        "blocks.{i}.recurrent": "model.layers.{i}.mamba",
        "blocks.{i}.recurrent.inputs": "model.layers.{i}.mamba.in_proj",
        "blocks.{i}.recurrent.conv": "model.layers.{i}.mamba.conv1d",
        "blocks.{i}.recurrent.norm": "model.layers.{i}.mamba.norm",
        "blocks.{i}.recurrent.out": "model.layers.{i}.mamba.out_proj",
        "blocks.{i}.mlp.up": "model.layers.{i}.shared_mlp.input_linear",
        "blocks.{i}.mlp.down": "model.layers.{i}.shared_mlp.output_linear",
        "blocks.{i}.mlp.shared.up": "model.layers.{i}.shared_mlp.input_linear",
        "blocks.{i}.mlp.shared.down": "model.layers.{i}.shared_mlp.output_linear",
        "blocks.{i}.mlp.router": f"{EXPERTS}router.layer",
        "blocks.{i}.mlp.expert_up": f"{EXPERTS}input_linear",
        "blocks.{i}.mlp.expert_down": f"{EXPERTS}output_linear",
    }

    @staticmethod
    def read_config(config: dict[str, Any]) -> GraniteHybridConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        expect(config, "hidden_act", "silu")
        expect(config, "time_step_limit", *UNLIMITED)
        expect(config, "position_embedding_type", None, "nope", "rope")
        layers = layer_count(config)
        kinds = _kinds(config, layers)
        shared = positive(config, "shared_intermediate_size")
        return GraniteHybridConfig.from_hf(
            # The width of the dense network; "intermediate_size" is that of the experts.
            config | {"intermediate_size": shared},
            **granite_fields(config),
            kinds=kinds,
            mamba=_mamba(config),
            rotates=(config.get("position_embedding_type") == "rope",) * layers,
            experts=_experts(config, shared),
        )

    def weight_map(self) -> WeightMap:
        return with_stacked_experts(super().weight_map(), self.config.experts)


def _kinds(config: dict[str, Any], layers: int) -> tuple[str, ...]:
    """Return the kind of each layer. Raises ConfigError if none attends."""
    given = config.get("layer_types", config.get("layers_block_type"))
    own = config | {"layer_types": given}
    kinds = layer_kinds(own, (RECURS,) * layers, (ATTENDS, RECURS), KINDS)
    return with_attention(kinds, ATTENDS)


def _mamba(config: dict[str, Any]) -> Mamba2Shape:
    """Read the sizes of the Mamba-2 layers. Raises ConfigError if they do not fit."""
    inner = positive(config, "mamba_expand", 2) * positive(config, "hidden_size")
    heads = positive(config, "mamba_n_heads", 128)
    groups = positive(config, "mamba_n_groups", 1)
    given = config.get("mamba_d_head", "auto")
    head_dim = inner // heads if given == "auto" else positive(config, "mamba_d_head")
    if heads * head_dim != inner or heads % groups:
        raise ConfigError(
            f"config.json has mamba_n_heads {heads} of mamba_d_head {head_dim} in mamba_n_groups "
            f"{groups}; the heads must fill mamba_expand * hidden_size = {inner}, and the groups "
            "must divide them."
        )
    return Mamba2Shape(
        heads,
        head_dim,
        groups,
        positive(config, "mamba_d_state", 256),
        conv_width(config, "mamba_d_conv", 4),
        positive_float(config, "rms_norm_eps"),
        bias=bool(config.get("mamba_proj_bias", False)),
        conv_bias=bool(config.get("mamba_conv_bias", True)),
    )


def _experts(config: dict[str, Any], shared: int) -> ExpertsShape | None:
    """Return the experts, to whose sum that of the `shared` width is added; None if dense."""
    if config.get("num_local_experts", 8) == 0:
        return None
    count = positive(config, "num_local_experts", 8)
    return ExpertsShape(
        count,
        experts_per_token(config, count),
        positive(config, "intermediate_size"),
        renormalises=True,
        shared=SharedExpert(shared),
    )
