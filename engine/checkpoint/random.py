"""Random weights, for measuring an architecture without its checkpoint."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from engine.checkpoint.parameters import parameters_of


def random_weights(
    model: nn.Module,
    *,
    dtype: torch.dtype,
    device: torch.device,
    on_filled: Callable[[nn.Module], None] = lambda layer: None,
) -> None:
    """Fill every parameter of `model`, which is on the meta device.

    Matrices are drawn from N(0, 0.02) and vectors from N(1, 0.02). Zeros would falsify
    measurements: a GPU multiplies them measurably faster than real weights. A parameter's seed is
    its number, so that those which all ranks have are equal on all of them.

    `on_filled` is as in `load_weights`.
    """
    generator = torch.Generator(device)
    for number, (name, parameter) in enumerate(list(model.named_parameters())):
        generator.manual_seed(number)
        owner, _, attribute = name.rpartition(".")
        layer = model.get_submodule(owner)
        kept = parameters_of(layer).dtype or dtype
        filled = torch.empty(parameter.shape, dtype=kept, device=device)
        filled.normal_(0.0 if parameter.ndim > 1 else 1.0, 0.02, generator=generator)
        new = nn.Parameter(filled, requires_grad=False)
        setattr(layer, attribute, new)
        if not any(own.is_meta for own in layer.parameters(recurse=False)):
            on_filled(layer)
    model.to(device)
