"""modelopt: fp8, nvfp4, mxfp8 and mxfp4 of NVIDIA's Model Optimizer.

The layouts are those of its unified Hugging Face export (github.com/NVIDIA/Model-Optimizer,
`modelopt/torch/export`). The settings are in config.json, or in hf_quant_config.json.
The tensors in the files say which layers are quantised. Each one must fit an algorithm that the
settings name.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.quantized.format import StorageFormat
from engine.checkpoint.quantized.groups import Grouped, form_of, in_blocks
from engine.checkpoint.quantized.layer import FLOATS, Layer, Shape, check_divides, check_shape
from engine.checkpoint.quantized.settings import Settings, choice, refuse
from engine.checkpoint.quantized.small_floats import e2m1, e8m0
from engine.ops.quantize import CodesForm

NAME = "modelopt"
BLOCK = 128  # outputs and inputs of a block of FP8_PB_WO
MIXED = "MIXED_PRECISION"


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How the weights of a layer are stored. Scales with `group` are [outputs, inputs / group]."""

    codes: str  # dtype of weight: F8_E4M3, or U8 with two e2m1 codes in a byte
    scales: Collection[str]  # dtypes of weight_scale
    group: int | None = None  # inputs that share a scale; None: see `scale_shapes`
    has_tensor_scale: bool = False  # weight_scale_2

    def scale_shapes(self, outputs: int, inputs: int) -> Sequence[Shape]:
        """Return the shapes that weight_scale may have."""
        if self.group is not None:
            return ((outputs, inputs // self.group),)
        down, across = -(-outputs // BLOCK), -(-inputs // BLOCK)
        return (), (1,), (outputs,), (outputs, 1), (down, across), (down, 1, across, 1)


FP8 = Algorithm("F8_E4M3", FLOATS)
MXFP8 = Algorithm("F8_E4M3", ("U8",), 32)
NVFP4 = Algorithm("U8", ("F8_E4M3",), 16, has_tensor_scale=True)
NVFP4_FP8 = Algorithm("U8", ("F8_E4M3",), 32, has_tensor_scale=True)
MXFP4 = Algorithm("U8", ("U8",), 32)
# By their names in upper case: some versions write the last two and FP8_PB_WO in lower case.
ALGORITHMS = {
    "FP8": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8,
    "FP8_PB_WO": FP8,
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "W4A8_NVFP4_FP8": NVFP4_FP8,
    "MXFP8": MXFP8,
    "MXFP4": MXFP4,
    "W4A8_MXFP4_FP8": MXFP4,
}


@dataclass(frozen=True, slots=True)
class ModelOpt(StorageFormat):
    """A layer stores, in an algorithm of fp8:

    - weight [outputs, inputs] e4m3;
    - weight_scale float: one, one for each output, or one for a block of 128 x 128.

    In mxfp8, weight_scale is uint8 [outputs, inputs / 32], see `e8m0`. In nvfp4 and mxfp4:

    - weight [outputs, inputs / 2] uint8, see `e2m1`;
    - weight_scale: of nvfp4 e4m3 [outputs, inputs / 16], of mxfp4 uint8 [outputs, inputs / 32];
    - weight_scale_2 fp32, of nvfp4, one, which multiplies weight_scale.

    A weight is code * scale.
    """

    algorithms: Sequence[Algorithm]
    has_kv_scales: bool

    kind = NAME
    endings = frozenset({"weight", "weight_scale", "weight_scale_2"})
    marks = frozenset({"weight_scale", "weight_scale_2"})
    unused = frozenset({"input_scale", "output_scale"})

    @classmethod
    def of(cls, settings: Settings) -> ModelOpt:
        """Read the settings. Raises ConfigError for an algorithm that is not served."""
        inner = settings.get("quantization", settings)  # as hf_quant_config.json nests them
        if not isinstance(inner, dict):
            raise refuse("quantization", inner, NAME, "an object with quant_algo")
        if inner.get("quant_algo") == MIXED:
            layers = inner.get("quantized_layers")
            if not isinstance(layers, dict) or not layers:
                raise refuse("quantized_layers", layers, NAME, "an object with a layer at least")
            found = [_algorithm(layer) for layer in layers.values()]
        else:
            found = [_algorithm(inner)]
        keys = ("kv_cache_scheme", "kv_cache_quant_algo")
        return cls(list(dict.fromkeys(found)), any(inner.get(key) for key in keys))

    def check(self, layer: Layer) -> None:
        """Raise ConfigError if the tensors of a layer fit no algorithm, or not each other."""
        fitting = self._fitting(layer)
        codes, scales = layer.parts["weight"], layer.parts["weight_scale"]
        outputs, inputs = _sizes(layer)
        group = fitting[0].group
        if group is not None:
            check_divides(codes, inputs, group, "inputs")
        shapes = [found.scale_shapes(outputs, inputs) for found in fitting]
        check_shape(scales, *itertools.chain(*shapes))
        if fitting[0].has_tensor_scale:
            check_shape(layer.part("weight_scale_2", ("F32",)), (), (1,))
        else:
            layer.refuse("weight_scale_2", f"weights with scales of dtype {scales.dtype}")

    def _fitting(self, layer: Layer) -> list[Algorithm]:
        """Return the algorithms with the dtypes of a layer. Raises ConfigError if there is none."""
        codes = layer.part("weight", {found.codes for found in self.algorithms}, 2)
        fitting = [found for found in self.algorithms if found.codes == codes.dtype]
        dtypes = list(itertools.chain(*(found.scales for found in fitting)))
        scales = layer.part("weight_scale", dtypes)
        return [found for found in fitting if scales.dtype in found.scales]

    def form(self, layer: Layer) -> CodesForm | None:
        """Return how the codes of a checked layer can be kept: those of mxfp4, as in mxfp4.py."""
        if self._fitting(layer)[0] != MXFP4:
            return None
        _, inputs = _sizes(layer)
        return form_of(8, inputs, layer.parts["weight_scale"].shape[1], has_zeros=False)

    def read(self, layer: Layer) -> Grouped:
        """Return the weights [outputs, inputs] of a checked layer."""
        algorithm = self._fitting(layer)[0]
        codes, scales = layer.parts["weight"].read(), layer.parts["weight_scale"].read()
        if algorithm == FP8:
            return _fp8(codes, scales)
        if algorithm == MXFP8:
            return Grouped(codes, e8m0(scales))
        if algorithm == MXFP4:
            return e2m1(codes, e8m0(scales))
        return e2m1(codes, scales.float() * layer.parts["weight_scale_2"].read())


def _algorithm(settings: Any) -> Algorithm:
    """Return the algorithm that settings name. Raises ConfigError if it is not served."""
    name = settings.get("quant_algo") if isinstance(settings, dict) else settings
    known = name.upper() if isinstance(name, str) else name
    if not isinstance(known, str) or known not in ALGORITHMS:
        raise refuse("quant_algo", name, NAME, ", ".join([*ALGORITHMS, MIXED]))
    algorithm = ALGORITHMS[known]
    if algorithm.group is not None:
        given = {"group_size": algorithm.group} | settings
        choice(given, "group_size", f"{NAME}, {name}", [algorithm.group])
    return algorithm


def _sizes(layer: Layer) -> tuple[int, int]:
    """Return (outputs, inputs)."""
    codes = layer.parts["weight"]
    outputs, width = codes.shape
    return outputs, 2 * width if codes.dtype == "U8" else width


def _fp8(codes: torch.Tensor, scales: torch.Tensor) -> Grouped:
    """Return the matrix of e4m3 codes, with scales of a shape of `scale_shapes`."""
    outputs, inputs = codes.shape
    if scales.ndim > 1 and scales.shape != (outputs, 1):
        in_order = scales.reshape(-(-outputs // BLOCK), -(-inputs // BLOCK))
        return in_blocks(codes, in_order, BLOCK, BLOCK)
    return Grouped(codes, scales.reshape(-1, 1))
