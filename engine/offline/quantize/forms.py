"""The forms in which `penstock quantize` stores a layer, all of compressed-tensors.

Each one is rounded some outputs at a time. The pieces of a stored tensor follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.quantized.groups import pack
from engine.checkpoint.quantized.layer import Shape
from engine.checkpoint.quantized.scheme import NAME, PACKED, Scheme, words
from engine.checkpoint.stored import DTYPES
from engine.offline.new_folder import Declared
from engine.ops.quantize import GROUP, Codes, float8, int4_with_zeros, quantize

ROWS = 8  # zero points of 8 outputs fill a word

Stored = dict[str, torch.Tensor]  # by ending, such as weight_scale


@dataclass(frozen=True, slots=True)
class Form:
    """A form of stored weights. `rounded` maps rows [n, inputs] fp32 to stored tensors."""

    layout: str  # compressed-tensors' `format`
    weights: Mapping[str, Any]  # its settings of weights
    scale_dtype: str
    rounded: Callable[[torch.Tensor], Stored]

    @property
    def config_group(self) -> dict[str, Any]:
        return {
            "targets": ["Linear"],
            "weights": {**WEIGHTS, **self.weights},
            "input_activations": None,
            "output_activations": None,
        }

    def settings(self, ignore: Sequence[str]) -> dict[str, Any]:
        """Return the quantization_config for config.json."""
        return {
            "quant_method": NAME,
            "format": self.layout,
            "quantization_status": "compressed",
            "config_groups": {"group_0": self.config_group},
            "ignore": list(ignore),
            "kv_cache_scheme": None,
            "global_compression_ratio": None,
        }

    def takes(self, inputs: int) -> bool:
        """Return whether a layer with this number of inputs can be stored: groups must be whole."""
        return inputs % (self.weights.get("group_size") or 1) == 0

    def declared(self, outputs: int, inputs: int) -> dict[str, Declared]:
        """Return the stored tensors of a layer by ending."""
        scheme = Scheme.of(self.config_group, self.layout)
        codes = "weight_packed" if scheme.is_packed else "weight"
        scale_shape = scheme.scale_shapes(outputs, inputs)[0]
        found = {
            codes: _declared(scheme.dtype, scheme.codes_shape(outputs, inputs)),
            "weight_scale": _declared(self.scale_dtype, scale_shape),
        }
        if not scheme.symmetric:
            zeros_shape = words(outputs, scheme.bits), scale_shape[1]
            found["weight_zero_point"] = _declared("I32", zeros_shape)
        if scheme.is_packed:
            found["weight_shape"] = _declared("I64", (2,))
        return found


def _declared(dtype: str, shape: Shape) -> Declared:
    return Declared(dtype, shape, math.prod(shape) * DTYPES[dtype].itemsize)


def _int8(rows: torch.Tensor) -> Stored:
    codes = quantize(rows, "int8")
    assert isinstance(codes, Codes)
    return {"weight_packed": pack(codes.codes, 8), "weight_scale": codes.scales}


def _int4(rows: torch.Tensor) -> Stored:
    codes = int4_with_zeros(rows)
    return {
        "weight_packed": pack(codes.codes, 4),
        "weight_scale": codes.scales,
        "weight_zero_point": pack(codes.zeros.t(), 4).t(),
    }


def _fp8(rows: torch.Tensor) -> Stored:
    codes, scales = float8(rows)
    return {"weight": codes, "weight_scale": scales}


# Settings that all forms share. Programs that read the format have no defaults for some of them.
WEIGHTS: dict[str, Any] = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": None,
    "observer": "minmax",
    "observer_kwargs": {},
}
OF_GROUPS = {"type": "int", "strategy": "group", "group_size": GROUP}
FORMS: dict[str, Form] = {
    "int8": Form(PACKED, {"num_bits": 8, "symmetric": True, **OF_GROUPS}, "F16", _int8),
    "int4": Form(PACKED, {"num_bits": 4, "symmetric": False, **OF_GROUPS}, "F16", _int4),
    "fp8": Form(
        "float-quantized",
        {"num_bits": 8, "symmetric": True, "type": "float", "strategy": "channel"},
        "F32",
        _fp8,
    ),
}
