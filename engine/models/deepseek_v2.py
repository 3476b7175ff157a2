"""DeepSeek-V2 (arXiv 2405.04434): latent attention, experts in groups, and shared experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from engine.checkpoint.weight_map import WeightMap
from engine.errors import ConfigError
from engine.layers.experts import ExpertsShape, RouterShape, SharedExpert
from engine.layers.latent import LatentAttention, LatentShape
from engine.layers.rotary import RopeScaling
from engine.models.base import (
    expect,
    experts_per_token,
    layer_count,
    nullable,
    positive,
    positive_float,
)
from engine.models.llama import NAMES, Llama, LlamaBlock, LlamaConfig
from engine.ops.experts import ExpertGroups

ATTENTION = "model.layers.{i}.self_attn"
MLP = "model.layers.{i}.mlp"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig(LlamaConfig):
    """The config of a DeepSeek checkpoint. `head_dim` is the rotated part of a head."""

    latent: LatentShape
    scale: float  # of attention scores
    draft_layers: int = 0  # for multi-token prediction, behind the others; they are not loaded


class DeepseekBlock(LlamaBlock):
    def __init__(self, config: DeepseekConfig, index: int) -> None:
        super().__init__(config, index)
        c = config
        self.attention = LatentAttention(c.hidden, c.latent, index, scale=c.scale, bias=c.qkv_bias)


class DeepseekV2(Llama):
    config: DeepseekConfig
    block = DeepseekBlock
    names: ClassVar[Mapping[str, str]] = NAMES | {
        "blocks.{i}.attention.q": f"{ATTENTION}.q_proj",
        "blocks.{i}.attention.q.down": f"{ATTENTION}.q_a_proj",
        "blocks.{i}.attention.q.norm": f"{ATTENTION}.q_a_layernorm",
        "blocks.{i}.attention.q.up": f"{ATTENTION}.q_b_proj",
        "blocks.{i}.attention.kv_down": f"{ATTENTION}.kv_a_proj_with_mqa",
        "blocks.{i}.attention.kv_norm": f"{ATTENTION}.kv_a_layernorm",
        "blocks.{i}.attention.kv_up": f"{ATTENTION}.kv_b_proj",
        "blocks.{i}.mlp.router": f"{MLP}.gate",
        "blocks.{i}.mlp.expert_up": f"{MLP}.experts.{{part}}_proj",
        "blocks.{i}.mlp.expert_down": f"{MLP}.experts.{{part}}_proj",
        "blocks.{i}.mlp.shared.up": f"{MLP}.shared_experts.{{part}}_proj",
        "blocks.{i}.mlp.shared.down": f"{MLP}.shared_experts.down_proj",
    }

    @staticmethod
    def read_config(config: dict[str, Any]) -> DeepseekConfig:
        """Read config.json. Raises ConfigError for a missing key or an unsupported variant."""
        expect(config, "scoring_func", "softmax")
        expect(config, "topk_method", "greedy", "group_limited_greedy")
        expect(config, "norm_topk_prob", None, False)
        expect(config, "mlp_bias", None, False)
        groups = None
        if config.get("topk_method") == "group_limited_greedy":
            groups = expert_groups(config, best=1)
        router = RouterShape(groups=groups, scale=routed_scale(config, 1.0), is_wide=True)
        experts = experts_shape(config, router, renormalises=False)
        return deepseek_config(config, experts, latent_shape(config, rotates_pairs=True))

    def weight_map(self) -> WeightMap:
        c = self.config
        layers = range(c.layers, c.layers + c.draft_layers)
        unused = [f"model.layers.{index}." for index in layers]
        return replace(super().weight_map(), ignored_prefixes=unused)


def deepseek_config(
    config: dict[str, Any], experts: ExpertsShape, latent: LatentShape, **own: Any
) -> DeepseekConfig:
    """Read what both generations share, around their experts and attention."""
    expect(config, "moe_layer_freq", 1)
    expect(config, "num_key_value_heads", None, latent.heads)
    expect(config, "head_dim", None, latent.rotated_dim)
    expect(config, "qk_head_dim", None, latent.query_dim)
    scaling = RopeScaling.from_hf(config)
    return DeepseekConfig.from_hf(
        config | {"head_dim": latent.rotated_dim},
        rope_scaling=scaling,
        experts=experts,
        dense_layers=frozenset(range(_dense_layers(config))),
        pairs=latent.rotates_pairs,
        latent=latent,
        scale=latent.query_dim**-0.5 * _yarn_scale(scaling),
        **own,
    )


def latent_shape(config: dict[str, Any], *, rotates_pairs: bool) -> LatentShape:
    return LatentShape(
        heads=positive(config, "num_attention_heads"),
        query_rank=nullable(config, "q_lora_rank", positive),
        latent=positive(config, "kv_lora_rank"),
        plain_dim=positive(config, "qk_nope_head_dim"),
        rotated_dim=positive(config, "qk_rope_head_dim", below=2**16),
        value_dim=positive(config, "v_head_dim"),
        rotates_pairs=rotates_pairs,
    )


def experts_shape(
    config: dict[str, Any], router: RouterShape, *, renormalises: bool
) -> ExpertsShape:
    """Read the sizes of the experts. Raises ConfigError if a token's groups have too few."""
    count = positive(config, "n_routed_experts")
    chosen = experts_per_token(config, count)
    size = positive(config, "moe_intermediate_size")
    groups = router.groups
    if groups is not None and chosen > groups.chosen * (count // groups.count):
        raise ConfigError(
            f"config.json has num_experts_per_tok {chosen}; {groups.chosen} groups have fewer "
            "experts."
        )
    return ExpertsShape(
        count,
        chosen,
        size,
        renormalises=renormalises,
        router=router,
        shared=SharedExpert(size * positive(config, "n_shared_experts")),
    )


def expert_groups(config: dict[str, Any], *, best: int) -> ExpertGroups:
    """Read the groups of experts. Raises ConfigError if they do not fit the number of experts."""
    count, experts = positive(config, "n_group"), positive(config, "n_routed_experts")
    chosen = positive(config, "topk_group")
    if experts % count or experts // count < best or chosen > count:
        raise ConfigError(
            f"config.json has n_group {count} and topk_group {chosen} for {experts} experts; "
            f"groups must be equal, of at least {best} experts, and no fewer than are chosen."
        )
    return ExpertGroups(count, chosen, best)


def routed_scale(config: dict[str, Any], default: float) -> float:
    key = "routed_scaling_factor"
    return positive_float({key: default} | config, key)


def _dense_layers(config: dict[str, Any]) -> int:
    """Return the number of leading layers without experts, from 0 to all."""
    key = "first_k_dense_replace"
    return 0 if config.get(key) == 0 else min(positive(config, key), layer_count(config))


def _yarn_scale(scaling: RopeScaling) -> float:
    """Return the factor on attention scores, as transformers 5.24 computes it."""
    if scaling.kind == "default" or scaling.factor <= 1:
        return 1.0
    growth = 0.1 * scaling.mscale_all_dim * math.log(scaling.factor)
    return (growth + 1.0) ** 2
