"""The plan of a prediction head: a layer of the checkpoint that drafts tokens for its own model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn

from engine.checkpoint.loader import assign
from engine.checkpoint.tensors import checkpoint_tensors
from engine.errors import ConfigError
from engine.layers.embedding import LMHead, TokenEmbedding
from engine.layers.experts import Experts
from engine.models.base import Predicts
from engine.models.vision.block import TowerLinear

if TYPE_CHECKING:
    from engine.memory.model_plan import ModelPlan

FLAG = "--speculation mtp"
MOST_COST = 0.25  # by default, of a drafted token: see docs/decisions-recurrent.md


class HeadPlan(NamedTuple):
    """A prediction head on the meta device, if it drafts.

    `unused` says why a head that the checkpoint has, or names, does not.
    """

    module: nn.Module | None = None
    unused: str = ""


def plan_head(plan: ModelPlan) -> HeadPlan:
    """Return the plan of the head of `plan`.

    Raises ConfigError if --speculation mtp is set and the head cannot draft.
    """
    wanted = plan.config.speculation
    if wanted not in ("auto", "mtp"):
        return HeadPlan()
    try:
        head = _head(plan)
    except ConfigError as error:
        if wanted == "mtp":
            raise ConfigError(
                f"{FLAG} is not possible: {error} Use --speculation ngram."
            ) from error
        return HeadPlan(unused=str(error) if _is_known(plan) else "")
    cost = draft_cost(plan.module, head)
    if wanted == "auto" and cost > MOST_COST:
        return HeadPlan(unused=f"Each drafted token would cost {cost:.0%} of a step.")
    return HeadPlan(head)


def draft_cost(model: nn.Module, head: nn.Module) -> float:
    """Return the numbers that are read for a drafted token, relative to a step of one token."""
    logits = sum(each.table.numel() for each in model.modules() if isinstance(each, LMHead))
    return (_numbers_read(head) + logits) / (_numbers_read(model) + logits)


def _numbers_read(module: nn.Module) -> float:
    """Return how many weights one token reads, without token embedding, logits and tower."""
    read = 0.0
    for layer in module.modules():
        if not isinstance(layer, TokenEmbedding | LMHead | TowerLinear):
            read += sum(p.numel() for p in layer.parameters(recurse=False))
        if isinstance(layer, Experts):
            experts = (*layer.expert_up.parameters(), *layer.expert_down.parameters())
            share = layer.shape.per_token / layer.shape.count
            read -= (1 - share) * sum(p.numel() for p in experts)
    return read


def _head(plan: ModelPlan) -> nn.Module:
    """Return the head on the meta device. Raises ConfigError if it cannot draft."""
    model, config = plan.model, plan.config
    if not isinstance(model, Predicts):
        raise ConfigError(f"{plan.architecture} has no prediction head that is served.")
    if config.speculative_model is not None:
        raise ConfigError("--speculative-model drafts already; leave one of them out.")
    if plan.ranks.count > 1:
        raise ConfigError(f"The prediction head needs one rank, not {plan.ranks.count}.")
    if plan.device.type == "cuda":
        raise ConfigError("The prediction head drafts on a CPU only.")
    with torch.device("meta"):
        head = model.prediction_head()
    if config.load_format != "dummy":
        assign(checkpoint_tensors(plan.folder), head.weight_map(), plan.folder)
    elif config.speculation == "auto":
        raise ConfigError("There are no weights that could contain it.")
    return cast(nn.Module, head)


def _is_known(plan: ModelPlan) -> bool:
    """Whether the user may expect the head to draft: config.json names it, or it is stored."""
    model, config = plan.model, plan.config
    if not isinstance(model, Predicts) or config.speculative_model is not None:
        return False
    if config.load_format == "dummy":
        return False
    return model.names_head or any("mtp." in name for name in checkpoint_tensors(plan.folder))
