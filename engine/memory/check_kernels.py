"""Whether the kernels of a device can compute a model as configured."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.errors import ConfigError
from engine.layers.experts import ExpertLinear

if TYPE_CHECKING:
    from engine.memory.model_plan import ModelPlan


def check_kernels(plan: ModelPlan) -> None:
    """Raise ConfigError if there is no kernel for the weights, or none that a flag is about."""
    if plan.config.kernels == "plain" and plan.kernels != "triton":
        raise ConfigError(
            f"--kernels plain is not possible on {plan.device} with these kernels: it turns off "
            "optimisations of Triton's kernels on a GPU. Leave the flag out; "
            "--attention-backend torch computes with torch's operations."
        )
    if plan.rounds_to and not plan.packs:
        raise ConfigError(f"--quantization needs {_packing_needs(plan.device)}.")
    has_experts = any(isinstance(each, ExpertLinear) for each in plan.module.modules())
    if not has_experts or plan.device.type != "cuda":
        return
    if plan.rounds_to is not None:
        raise ConfigError(
            "--quantization is not possible on a GPU for a mixture of experts: there is no kernel "
            "for codes of experts. Leave the flag out."
        )
    if plan.kernels != "triton":
        raise ConfigError("A mixture of experts needs the package triton on a GPU.")


def _packing_needs(device: torch.device) -> str:
    if device.type == "cpu":
        return "a CPU with oneDNN's kernels, and not --no-prepack"
    return "the package triton on a GPU"
