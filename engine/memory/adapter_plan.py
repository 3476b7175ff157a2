"""The plan of the LoRA adapters: how many are in memory at once, and up to which rank."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.checkpoint.adapter.weights import StoredAdapter
from engine.config import AdapterSource, EngineConfig, adapter_sources
from engine.errors import ConfigError
from engine.layers.linear import Linear
from engine.layers.lora import shape_of
from engine.models.adapters import AdapterPlan

if TYPE_CHECKING:
    from engine.memory.model_plan import ModelPlan

DEFAULT_SLOTS, DEFAULT_RANK = 8, 16


def plan_adapters(plan: ModelPlan) -> AdapterPlan | None:
    """Return the plan of the adapters, or None if the configuration has none.

    Raises ConfigError if the model takes none, or an adapter's folder cannot be used.
    """
    config = plan.config
    sources = adapter_sources(config)
    num_slots = config.max_loras or (DEFAULT_SLOTS if sources else 0)
    if not num_slots:
        return None
    if plan.kind != "decoder":
        raise ConfigError(
            f"--lora-modules and --max-loras are not possible: {plan.architecture} is an "
            f"{plan.kind}, and adapters need a decoder."
        )
    shapes = {
        name: shape_of(layer.tensors, plan.dtype, plan.device)
        for name, layer in plan.module.named_modules()
        if isinstance(layer, Linear) and layer.takes_adapters
    }
    rank = config.max_lora_rank or _largest_rank(config, sources)
    is_packed = plan.device.type == "cpu" and plan.can_pack
    return AdapterPlan(num_slots, rank, sources, shapes, is_packed)


def _largest_rank(config: EngineConfig, sources: tuple[AdapterSource, ...]) -> int:
    """Return the largest rank of the given adapters, at least the default."""
    ranks = []
    for source in sources:
        try:
            ranks.append(StoredAdapter.open(source.path).rank)
        except ConfigError as error:
            raise ConfigError(f"--lora-modules {source.name}: {error}") from error
    return max([DEFAULT_RANK, *ranks])
