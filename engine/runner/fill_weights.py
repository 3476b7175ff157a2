"""Fill the weights of a plan's model from its files, and pack them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

import torch
from torch import nn

from engine.checkpoint.loader import load_weights
from engine.checkpoint.random import random_weights
from engine.checkpoint.weight_map import WeightMap, targets_by_module
from engine.device.limits import release_unused
from engine.layers.embedding import LMHead
from engine.layers.linear import Linear
from engine.layers.position_tables import fill_tables
from engine.memory.model_plan import ModelPlan
from engine.memory.pooler_plan import pooler_bytes
from engine.memory.report import weights_bytes
from engine.models.base import PredictionHead
from engine.ops.kernels import use_kernels
from engine.protocol.ready import Progress

Report = Callable[[Progress], None]


def fill_weights(plan: ModelPlan, report: Report) -> int:
    """Fill the weights of the plan's modules and choose their kernels; return their bytes."""
    plan.check_weights()
    _fill(plan, plan.module, plan.weight_map(), "loading weights", report)
    _fill_pooler(plan)
    if plan.prediction.module is not None:
        weight_map = cast(PredictionHead, plan.prediction.module).weight_map()
        _fill(plan, plan.prediction.module, weight_map, "loading the prediction head", report)
    release_unused()
    behind = pooler_bytes(plan.pooler)
    if plan.quantization:
        return sum(weights_bytes(module) for module in plan.modules) + behind
    return plan.rank_parameters * plan.dtype.itemsize + behind


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
            tensors=plan.tensors,
            progress=lambda fraction: report(Progress(stage, fraction)),
            on_filled=on_filled,
        )
    for layer in module.modules():
        if isinstance(layer, LMHead) and layer.tied_to is not None:
            _pack(plan, layer)


def _fill_pooler(plan: ModelPlan) -> None:
    """Fill the modules behind the pooling, each from its own folder."""
    if plan.pooler is None:
        return
    device, is_dummy = plan.device, plan.config.load_format == "dummy"
    for dense in plan.pooler.dense_modules:
        if is_dummy:
            random_weights(dense, dtype=torch.float32, device=device)
        else:
            names = WeightMap(targets_by_module(dense, {"linear": "linear"}))
            folder = dense.config.folder
            load_weights(dense, names, folder, dtype=torch.float32, device=device)
        if plan.prepacks:
            dense.linear.prepack()


def _pack(plan: ModelPlan, layer: nn.Module) -> None:
    """Pack the weight of a layer that has one, if this plan packs weights."""
    if plan.packs and isinstance(layer, Linear | LMHead):
        layer.prepack(plan.rounds_to)
