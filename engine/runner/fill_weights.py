"""Fill the weights of a plan's model from its files, and pack them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

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
from engine.ops.kernels import use_kernels
from engine.protocol.ready import Progress

Report = Callable[[Progress], None]


def fill_weights(plan: ModelPlan, report: Report) -> int:
    """Fill the module's weights and choose its kernels; return the bytes of the weights."""
    plan.check_weights()
    use_kernels(plan.module, plan.kernels)
    fill_tables(plan.module)
    # Each layer is packed as soon as it is filled, so that few plain weights exist at once.
    on_filled = partial(_pack, plan)
    if plan.config.load_format == "dummy":
        random_weights(plan.module, dtype=plan.dtype, device=plan.device, on_filled=on_filled)
    else:
        load_weights(
            plan.module,
            plan.weight_map(),
            plan.folder,
            dtype=plan.dtype,
            device=plan.device,
            progress=lambda fraction: report(Progress("loading weights", fraction)),
            on_filled=on_filled,
        )
    _fill_pooler(plan)
    for layer in plan.module.modules():
        if isinstance(layer, LMHead) and layer.tied_to is not None:
            _pack(plan, layer)
    release_unused()
    behind = pooler_bytes(plan.pooler)
    if plan.quantization:
        return weights_bytes(plan.module) + behind
    return plan.rank_parameters * plan.dtype.itemsize + behind


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
