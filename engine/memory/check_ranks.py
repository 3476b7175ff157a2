"""Checks of a plan for several ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.device.ranks import FLAG
from engine.errors import ConfigError
from engine.layers.linear import Linear
from engine.ops.codes import GROUPS
from engine.ops.quantize import is_quantized

if TYPE_CHECKING:
    from engine.memory.model_plan import ModelPlan


def check_ranks(plan: ModelPlan) -> None:
    """Raise ConfigError if the plan has several ranks and something that needs a single one."""
    config, count = plan.config, plan.ranks.count
    if count == 1:
        return
    flag = f"{FLAG} {count} is not possible"
    if config.speculative_model is not None:
        raise ConfigError(f"{flag} with --speculative-model. Leave one of them out.")


def check_groups(plan: ModelPlan) -> None:
    """Raise ConfigError if a rank's share of quantised inputs does not consist of whole groups."""
    for name, layer in plan.module.named_modules():
        if not isinstance(layer, Linear) or layer.tensors.shard is None:
            continue
        shard = layer.tensors.shard
        whole, columns = shard.shape[1], shard.columns
        kind = plan.rounds_to if layer.is_rounded else None
        if layer.tensors.stored_form is not None:
            kind = "int8"  # of every kind of stored codes, groups have the same size
        if kind is None or not is_quantized(whole, kind):
            continue
        size = columns.stop - columns.start
        if size < whole and size % GROUPS[kind]:
            raise ConfigError(
                f"{FLAG} {plan.ranks.count} is not possible with these quantised weights: a rank "
                f"has {size} inputs of {name}, which are no whole groups of {GROUPS[kind]}. Use "
                "--quantization none."
            )
