"""Plan a decoder that makes vectors of texts: its trunk without the head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.attention.kv_cache import block_bytes, group_layers, one_of_each_class
from engine.attention.spec import AttentionSpec
from engine.checkpoint.sentence import has_modules
from engine.checkpoint.weight_map import WeightMap
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.layers.attention import Attention, kv_specs
from engine.layers.embedding import LMHead
from engine.layers.state import state_specs
from engine.models.base import Model
from engine.models.registry import DECODER_CLASSIFIERS, TRUNKS

SPARE_TEXTS = 64  # more texts that a step may have without being divided


@dataclass(frozen=True)
class TrunkPlan:
    """The KV cache of the texts of one step."""

    kv_specs: Sequence[AttentionSpec]
    shares_blocks: bool  # whether layers of one class use the same blocks
    num_blocks: int
    num_bytes: int


def is_trunk(config: EngineConfig, folder: Path, architecture: str) -> bool:
    """Return whether a decoder makes vectors: as configured, by its files, or without a head."""
    has_no_head = architecture in TRUNKS or architecture in DECODER_CLASSIFIERS
    return config.pooling is not None or has_no_head or has_modules(folder)


def check_trunk(hf_config: Mapping[str, Any], module: nn.Module, config: EngineConfig) -> None:
    """Raise ConfigError if a decoder cannot make vectors."""
    if hf_config.get("is_causal") is False:
        raise ConfigError(
            "config.json has is_causal = false, attention to both sides; decoders make vectors "
            "with causal attention only."
        )
    if state_specs(module):
        raise ConfigError(
            "The model has recurrent layers, whose vectors of texts are not computed. Leave "
            "--pooling out to generate texts."
        )
    if config.kv_cache_dtype != "auto":
        raise ConfigError(
            f"--kv-cache-dtype {config.kv_cache_dtype} is not possible for vectors of texts, which "
            "are not kept in a KV cache."
        )


def drop_head(module: nn.Module, model: Model) -> tuple[str, ...]:
    """Remove the head, which vectors do not need; return the names of its tensors."""
    targets = model.weight_map().targets
    heads = [name for name, layer in module.named_modules() if isinstance(layer, LMHead)]
    dropped = tuple(f"{name}." for name in heads)
    tensors = [name for name, target in targets.items() if target.parameter.startswith(dropped)]
    for name in heads:
        owner, _, attribute = name.rpartition(".")
        setattr(module.get_submodule(owner), attribute, None)
    return tuple(tensors)


def plan_trunk(
    module: nn.Module,
    config: EngineConfig,
    dtype: torch.dtype,
    *,
    step_tokens: int,
) -> TrunkPlan:
    """Plan the KV cache of a step of `step_tokens`. Each KV group needs its own blocks."""
    specs = kv_specs(module)
    layers = [layer for layer in module.modules() if isinstance(layer, Attention)]
    shares_blocks = len(specs) == len(layers)  # no layer reads the KV of an earlier one
    kept = one_of_each_class(specs) if shares_blocks else specs
    per_group = -(-step_tokens // config.block_size) + SPARE_TEXTS
    num_blocks = per_group * len(group_layers(kept).groups)
    num_bytes = (num_blocks + 1) * block_bytes(kept, config.block_size, dtype)
    return TrunkPlan(specs, shares_blocks, num_blocks, num_bytes)


def trunk_weight_map(weight_map: WeightMap, head_tensors: Sequence[str]) -> WeightMap:
    """Return the map of a trunk, whose names may lack the beginning that all have in common."""
    common = _common_beginning(list(weight_map.targets))
    begins = weight_map.prefixes

    def short(names: Mapping[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(common): value for name, value in names.items()}

    return replace(
        weight_map,
        targets=short(weight_map.targets),
        prefixes=tuple(dict.fromkeys([*(begin + common for begin in begins), *begins])),
        aliases=short(weight_map.aliases),
        fused=short(weight_map.fused),
        ignored=(*weight_map.ignored, *head_tensors),
    )


def _common_beginning(names: Sequence[str]) -> str:
    """Return the parts, each with its dot, with which all names begin."""
    common: list[str] = []
    for parts in zip(*(name.split(".")[:-1] for name in names), strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return "".join(f"{part}." for part in common)
