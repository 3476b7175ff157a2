"""compressed-tensors: whole numbers, packed or not, fp8 and fp4, with scales of many kinds.

The layouts are those of github.com/vllm-project/compressed-tensors. The tensors in the files say
which layers are quantised. Every one of them must fit a group in config.json.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.checkpoint.quantized.format import StorageFormat
from engine.checkpoint.quantized.groups import Grouped, form_of, in_blocks, unpack
from engine.checkpoint.quantized.layer import (
    Layer,
    Shape,
    check_divides,
    check_shape,
    read_groups,
)
from engine.checkpoint.quantized.scheme import MXFP4, NAME, NVFP4, Scheme, words
from engine.checkpoint.quantized.settings import Settings, refuse
from engine.checkpoint.quantized.small_floats import e2m1, e8m0
from engine.checkpoint.stored import StoredTensor
from engine.errors import ConfigError
from engine.ops.quantize import CodesForm

CODES = ("weight_packed", "weight")
NOT_MICRO = ("weight_zero_point", "weight_g_idx")  # tensors that small scales exclude


@dataclass(frozen=True, slots=True)
class CompressedTensors(StorageFormat):
    """A layer stores, with `groups` = 1 for a scale for each output:

    - weight [outputs, inputs] int8 or fp8; or weight_shape [2] and weight_packed [outputs, words]
      int32, which holds codes + 2^(bits - 1), with padding at the end of a row;
    - weight_scale [outputs, groups], or one for each tensor or block;
    - weight_zero_point, if the codes are not symmetric: as the scales, or packed along the outputs;
    - weight_g_idx [inputs] int32, the group of each input, if inputs were reordered. -1 stands for
      groups in order.

    A weight is (code - zero) * scale. Three formats have scales [outputs, inputs / 16 or 32] in
    small floats:

    - nvfp4: weight_packed [outputs, inputs / 2] uint8, see `e2m1`; weight_scale e4m3, which
      weight_global_scale [1] fp32 divides;
    - mxfp4: the same weight_packed; weight_scale uint8, see `e8m0`;
    - mxfp8: weight fp8, and the scales of mxfp4.
    """

    schemes: Sequence[Scheme]
    has_kv_scales: bool

    kind = NAME
    endings = frozenset({*CODES, "weight_scale", "weight_global_scale", *NOT_MICRO, "weight_shape"})
    marks = endings - {"weight"}
    unused = frozenset(
        {
            "input_scale",
            "input_global_scale",
            "input_zero_point",
            "output_scale",
            "output_global_scale",
            "output_zero_point",
        }
    )

    @classmethod
    def of(cls, settings: Settings) -> CompressedTensors:
        """Read the settings. Raises ConfigError for a variant that is not served."""
        sparsity = settings.get("sparsity_config") or {"format": "dense"}
        sparse_format = sparsity
        if isinstance(sparsity, dict):
            sparse_format = sparsity.get("format")
        if sparse_format != "dense":
            raise refuse("sparsity_config.format", sparse_format, NAME, "dense")
        if transforms := settings.get("transform_config"):
            raise refuse("transform_config", transforms, NAME, "none")
        groups = settings.get("config_groups")
        if not isinstance(groups, dict) or not groups:
            raise refuse("config_groups", groups, NAME, "an object with a group at least")
        schemes = []
        for name, group in groups.items():
            key = f"config_groups.{name:.99}"
            if not isinstance(group, dict):
                raise refuse(key, group, NAME, "an object with weights")
            weights = group.get("weights")
            if weights is None:  # only activations are quantised
                continue
            if not isinstance(weights, dict):
                raise refuse(key, group, NAME, "an object with weights")
            schemes.append(Scheme.of(group, settings.get("format")))
        return cls(schemes, bool(settings.get("kv_cache_scheme")))

    def check(self, layer: Layer) -> None:
        """Raise ConfigError if the tensors of a layer fit no group, or not each other."""
        outputs, inputs = _sizes(layer)
        scheme = self._scheme_of(layer, outputs, inputs)
        scales = layer.parts["weight_scale"]
        if scheme.strategy == "group":
            check_divides(scales, inputs, scheme.group_size, "inputs")
        if scheme.is_micro:
            _check_micro(layer, scheme)
            return
        layer.refuse("weight_global_scale", f"the format {scheme.form}")
        if not scheme.symmetric or "weight_zero_point" in layer.parts:
            _check_zeros(layer, scheme, outputs)
        if "weight_g_idx" in layer.parts:
            groups = layer.part("weight_g_idx", ("I32", "I64"))
            check_shape(groups, (inputs,))
            if scheme.strategy != "group":
                raise ConfigError(
                    f"{groups.name} in {groups.file} names groups; config.json has the strategy "
                    f"{scheme.strategy}."
                )

    def _scheme_of(self, layer: Layer, outputs: int, inputs: int) -> Scheme:
        """Return the group that a layer fits. Raises ConfigError if there is none."""
        codes = next(layer.parts[name] for name in CODES if name in layer.parts)
        schemes = [scheme for scheme in self.schemes if scheme.dtype == codes.dtype]
        if not schemes:
            raise ConfigError(
                f"{codes.name} in {codes.file} has dtype {codes.dtype}, as no group in config.json "
                "does."
            )
        codes_shapes = [(scheme.codes_shape(outputs, inputs),) for scheme in schemes]
        schemes = _fitting(codes, schemes, codes_shapes)
        dtypes = list(dict.fromkeys(itertools.chain(*(scheme.scale_dtypes for scheme in schemes))))
        scales = layer.part("weight_scale", dtypes)
        schemes = [scheme for scheme in schemes if scales.dtype in scheme.scale_dtypes]
        scales_shapes = [scheme.scale_shapes(outputs, inputs) for scheme in schemes]
        schemes = _fitting(scales, schemes, scales_shapes)
        has_zeros = "weight_zero_point" in layer.parts
        for scheme in schemes:
            if scheme.symmetric != has_zeros:
                return scheme
        return schemes[0]

    def form(self, layer: Layer) -> CodesForm | None:
        """Return how the codes of a checked layer can be kept."""
        outputs, inputs = _sizes(layer)
        scheme = self._scheme_of(layer, outputs, inputs)
        scales = layer.parts["weight_scale"]
        groups = scales.shape[1] if len(scales.shape) > 1 else 1
        if scheme.form == MXFP4:  # twice e2m1 is whole, as in mxfp4.py
            return form_of(8, inputs, groups, has_zeros=False)
        if scheme.is_float or scheme.strategy == "block":
            return None
        if inputs % groups or _groups(layer, groups) is not None:
            return None
        has_zeros = "weight_zero_point" in layer.parts
        return form_of(scheme.bits, inputs, groups, has_zeros=has_zeros)

    def read(self, layer: Layer) -> Grouped:
        """Return the weights [outputs, inputs] of a checked layer."""
        outputs, inputs = _sizes(layer)
        scheme = self._scheme_of(layer, outputs, inputs)
        if scheme.is_micro:
            return _read_micro(layer, scheme)
        scales = layer.parts["weight_scale"].read()
        codes = _codes(layer, scheme, inputs)
        if scheme.strategy == "block":
            return in_blocks(codes, scales, *scheme.block)
        if scales.ndim < 2:
            scales = scales.reshape(-1, 1)
        zeros = _zeros(layer, scheme, outputs)
        if zeros is not None:
            zeros = zeros.reshape(scales.shape)
        return Grouped(codes, scales, zeros, _groups(layer, scales.shape[1]))


def _check_micro(layer: Layer, scheme: Scheme) -> None:
    """Raise ConfigError if the tensors of a layer with small scales do not fit its format."""
    for ending in NOT_MICRO:
        layer.refuse(ending, f"the format {scheme.form}")
    if scheme.form == NVFP4:
        check_shape(layer.part("weight_global_scale", ("F32",)), (1,), ())
    else:
        layer.refuse("weight_global_scale", f"the format {scheme.form}")


def _read_micro(layer: Layer, scheme: Scheme) -> Grouped:
    scales = layer.parts["weight_scale"].read()
    if scheme.form == NVFP4:
        divisor = layer.parts["weight_global_scale"].read()
        return e2m1(layer.parts["weight_packed"].read(), scales.float() / divisor)
    if scheme.form == MXFP4:
        return e2m1(layer.parts["weight_packed"].read(), e8m0(scales))
    return Grouped(layer.parts["weight"].read(), e8m0(scales))


def _check_zeros(layer: Layer, scheme: Scheme, outputs: int) -> None:
    """Raise ConfigError if the zero points do not fit the scales."""
    scales = layer.parts["weight_scale"]
    dtypes = ("I8", "F8_E4M3")
    if scheme.is_packed and scheme.strategy in ("channel", "group"):
        dtypes = ("I8", "I32")
    zeros = layer.part("weight_zero_point", dtypes)
    if scheme.strategy == "block":
        raise ConfigError(
            f"{zeros.name} in {zeros.file} is a zero point; blocks with zero points are not served."
        )
    expected = scales.shape
    if zeros.dtype == "I32":
        expected = (words(outputs, scheme.bits), *scales.shape[1:])
    check_shape(zeros, expected)


def _fitting(
    tensor: StoredTensor, schemes: Sequence[Scheme], shapes: Sequence[Sequence[Shape]]
) -> list[Scheme]:
    """Return the schemes that allow a tensor's shape. Raises ConfigError if none does."""
    expected = list(dict.fromkeys(itertools.chain(*shapes)))
    check_shape(tensor, *expected)
    fitting = []
    for scheme, allowed in zip(schemes, shapes, strict=True):
        if tensor.shape in allowed:
            fitting.append(scheme)
    return fitting


def _sizes(layer: Layer) -> tuple[int, int]:
    """Return (outputs, inputs). Raises ConfigError if the stored shape is not that of the codes."""
    if "weight_packed" not in layer.parts:
        layer.refuse_both("weight", "weight_shape")
        outputs, inputs = layer.part("weight", ("I8", "F8_E4M3"), 2).shape
        return outputs, inputs
    layer.refuse_both("weight", "weight_packed")
    codes = layer.part("weight_packed", ("I32", "U8"), 2)
    if codes.dtype == "U8":
        layer.refuse("weight_shape", "codes in bytes")
        return codes.shape[0], 2 * codes.shape[1]
    stored = layer.part("weight_shape", ("I64", "I32"))
    check_shape(stored, (2,))
    outputs, inputs = stored.read().tolist()
    if outputs != codes.shape[0] or inputs < 1:
        raise ConfigError(
            f"{stored.name} in {stored.file} is {[outputs, inputs]}, and {codes.name} has "
            f"{codes.shape[0]} rows."
        )
    return outputs, inputs


def _codes(layer: Layer, scheme: Scheme, inputs: int) -> torch.Tensor:
    """Return the codes [outputs, inputs]: int8 or fp8."""
    if not scheme.is_packed:
        return layer.parts["weight"].read()
    packed = unpack(layer.parts["weight_packed"].read(), scheme.bits)
    return _signed(packed[:, :inputs], scheme.bits)


def _zeros(layer: Layer, scheme: Scheme, outputs: int) -> torch.Tensor | None:
    """Return the zero points, one for each scale; int8 or fp32."""
    stored = layer.parts.get("weight_zero_point")
    if stored is None:
        return None
    if stored.dtype != "I32":
        return stored.read().float()
    packed = stored.read().reshape(stored.shape[0], -1)
    codes = unpack(packed.t(), scheme.bits).t()
    return _signed(codes[:outputs], scheme.bits)


def _signed(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Subtract 2^(bits - 1) from uint8 codes below 2^bits: the packed form has no sign."""
    if bits == 8:
        return (codes ^ 0x80).view(torch.int8)
    return codes.view(torch.int8) - 8


def _groups(layer: Layer, groups: int) -> torch.Tensor | None:
    """Return the group of each input; None if the groups are in order.

    Raises ConfigError if the groups differ in size: their order would be ambiguous.
    """
    stored = layer.parts.get("weight_g_idx")
    if stored is None:
        return None
    is_unset = stored.read() == -1
    if is_unset.any():
        return None
    group_of = read_groups(stored, groups)
    sizes = torch.bincount(group_of, minlength=groups)
    if int(sizes.min()) != int(sizes.max()):
        raise ConfigError(f"{stored.name} in {stored.file} has groups of different sizes.")
    return group_of
