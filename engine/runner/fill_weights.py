"""Fill the weights of a plan's model from its files, and pack them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from torch import nn

from engine.checkpoint.loader import load_weights
from engine.checkpoint.random import random_weights
from engine.checkpoint.weight_map import WeightMap
from engine.device.limits import release_unused
from engine.layers.embedding import LMHead
from engine.layers.linear import Linear
from engine.layers.position_tables import fill_tables
from engine.memory.model_plan import ModelPlan
from engine.memory.report import weights_bytes
from engine.models.base import PredictionHead
from engine.ops.kernels import use_kernels
from engine.protocol.ready import Progress

Report = Callable[[Progress], None]


def fill_weights(plan: ModelPlan, report: Report) -> int:
    """Fill the weights of the plan's modules and choose their kernels; return their bytes."""
    plan.check_weights()
    _fill(plan, plan.module, plan.model.weight_map(), "loading weights", report)
    if plan.head.module is not None:
        weight_map = cast(PredictionHead, plan.head.module).weight_map()
        _fill(plan, plan.head.module, weight_map, "loading the prediction head", report)
    release_unused()
    if plan.quantization:
        return sum(weights_bytes(module) for module in plan.modules)
    return plan.rank_parameters * plan.dtype.itemsize


def _fill(
    plan: ModelPlan, module: nn.Module, weight_map: WeightMap, stage: str, report: Report
) -> None:
    use_kernels(module, plan.kernels)
    fill_tables(module)
    # Each layer is packed as soon as it is filled, so that few plain weights exist at once.
    on_filled = partial(_pack, plan)
    if plan.config.load_format == "dummy":
        random_weights(module, dtype=plan.dtype, device=plan.device, on_filled=on_filled)
    else:
        load_weights(
            module,
            weight_map,
            plan.folder,
            dtype=plan.dtype,
            device=plan.device,
            progress=lambda fraction: report(Progress(stage, fraction)),
            on_filled=on_filled,
        )
    for layer in module.modules():
        if isinstance(layer, LMHead) and layer.tied_to is not None:
            _pack(plan, layer)


def _pack(plan: ModelPlan, layer: nn.Module) -> None:
    """Pack the weight of a layer that has one, if this plan packs weights."""
    if plan.packs and isinstance(layer, Linear | LMHead):
        layer.prepack(plan.rounds_to)
