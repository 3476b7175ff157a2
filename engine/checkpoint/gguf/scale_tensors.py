"""Scales of NVFP4 weights, which are tensors of their own.

A weight `blk.0.ffn_up.weight` is multiplied by the number in `blk.0.ffn_up.scale`, and each expert
of `ffn_up_exps` by its own. `.input_scale` is for inputs in 4 bits, which neither Penstock nor
llama.cpp on a CPU rounds them to.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from engine.checkpoint.gguf.header import StoredTensor, read_floats
from engine.errors import ConfigError

KIND = "NVFP4"
SCALE, INPUT_SCALE = ".scale", ".input_scale"


def with_scales(tensors: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors with the scales of NVFP4 weights in them, and not by themselves.

    Raises ConfigError if there are neither one scale nor as many as experts, or they are not fp32.
    """
    found = dict(tensors)
    for name, weight in tensors.items():
        if weight.kind.name != KIND or not name.endswith(".weight"):
            continue
        module = name.removesuffix(".weight")
        found.pop(module + INPUT_SCALE, None)
        scale = found.pop(module + SCALE, None)
        if scale is None:
            continue
        scales = tuple(read_floats(module + SCALE, scale))
        experts = weight.shape[0] if name.endswith("_exps.weight") else 1
        if len(scales) not in (1, experts):
            raise ConfigError(
                f"{module}{SCALE} in {scale.file} has {len(scales)} numbers; {name} needs 1"
                f"{f' or {experts}' if experts > 1 else ''}."
            )
        found[name] = replace(weight, scales=scales)
    return found
