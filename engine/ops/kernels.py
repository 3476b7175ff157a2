"""Which kernels compute a model's ops: selected once, when the model is planned.

Every op with more than one implementation takes the choice as an argument. Layers hold it as an
attribute, which `use_kernels` sets once, before loading. Kernels are imported inside the ops, never
at the top of a file: a machine without a GPU needs no triton.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch
from torch import nn

# "torch" is the reference, and computes the ops for which there is no kernel of the selected kind.
# "triton" kernels run on a GPU, or in Triton's interpreter in tests. "numba" kernels run on a CPU.
Kernels = Literal["torch", "triton", "numba"]


def select_kernels(device: torch.device, attention_backend: str) -> Kernels:
    """Return the kernels for a device: Triton's on a GPU, Numba's if that backend is named."""
    if device.type == "cuda" and find_spec("triton") is not None:
        return "triton"
    return "numba" if attention_backend == "numba" else "torch"


def use_kernels(module: nn.Module, kernels: Kernels) -> None:
    """Let every layer of `module` compute with these kernels."""
    for layer in module.modules():
        if hasattr(layer, "kernels"):
            setattr(layer, "kernels", kernels)  # noqa: B010 - mypy takes attributes of modules for tensors
