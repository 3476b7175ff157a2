"""torchao: whole numbers of 4 or 8 bits, and fp8, as its safetensors files hold them.

The layout is that of `flatten_tensor_state_dict` of torchao 0.18 (github.com/pytorch/ao), for its
classes Int4Tensor, IntxUnpackedToInt8Tensor, Int8Tensor and Float8Tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.quantized.format import StorageFormat
from engine.checkpoint.quantized.groups import Grouped
from engine.checkpoint.quantized.layer import FLOATS, Layer, check_shape
from engine.checkpoint.quantized.settings import Settings, choice, refuse
from engine.checkpoint.stored import StoredTensor
from engine.errors import ConfigError

NAME = "torchao"
CODES, SCALE, ZERO = "_weight_qdata", "_weight_scale", "_weight_zero_point"
PACKED = "two int4 in a byte"
# The codes that configurations of torchao store. Each pair differs in activations only.
STORED = {
    "Int4WeightOnlyConfig": PACKED,
    "Float8DynamicActivationInt4WeightConfig": PACKED,
    "IntxWeightOnlyConfig": "I8",
    "Int8DynamicActivationIntxWeightConfig": "I8",
    "Int8WeightOnlyConfig": "I8",
    "Int8DynamicActivationInt8WeightConfig": "I8",
    "Float8WeightOnlyConfig": "F8_E4M3",
    "Float8DynamicActivationFloat8WeightConfig": "F8_E4M3",
}
BY_NAME = "FqnToConfig"  # a configuration for each layer, by its name or a pattern
# The packing of codes that needs no kernel of its own, by the key of a configuration.
PLAIN = {"int4_packing_format": "PLAIN", "intx_packing_format": "UNPACKED_TO_INT8"}


@dataclass(frozen=True, slots=True)
class TorchAO(StorageFormat):
    """A layer stores:

    - _weight_qdata [outputs, inputs] int8 or e4m3;
    - _weight_scale float [outputs, groups], or one;
    - _weight_zero_point, as the scales, int8 or float; of int8 only, and optional.

    A weight is (code - zero) * scale. Int4Tensor stores:

    - _weight_qdata [outputs, inputs / 2] int8: two signed codes, the first in the lower four bits;
    - _weight_scale and _weight_zero_point [groups, outputs] float.

    Its weights are code * scale + zero.
    """

    stored: frozenset[str]  # of STORED; PACKED stands alone

    kind = NAME
    endings = frozenset({CODES, SCALE, ZERO})
    marks = endings

    @classmethod
    def of(cls, settings: Settings) -> TorchAO:
        """Read the settings. Raises ConfigError for a variant that is not served."""
        given = settings.get("quant_type")
        if isinstance(given, dict):
            given = given.get("default")
        stored = frozenset(_stored(config) for config in _configs(given))
        if PACKED in stored and len(stored) > 1:
            raise refuse("quant_type", BY_NAME, NAME, f"{PACKED} for all layers, or for none")
        return cls(stored)

    @property
    def _is_packed(self) -> bool:
        return PACKED in self.stored

    def check(self, layer: Layer) -> None:
        """Raise ConfigError if the tensors of a layer do not fit each other."""
        codes = layer.part(CODES, ("I8",) if self._is_packed else self.stored, 2)
        scales = layer.part(SCALE, FLOATS)
        outputs, inputs = codes.shape
        if self._is_packed:
            groups = scales.shape[0] if scales.shape else 1
            check_shape(scales, (groups, outputs))
            _check_groups(codes, 2 * inputs, groups)
            check_shape(layer.part(ZERO, FLOATS), scales.shape)
            return
        groups = _groups(layer)
        check_shape(scales, (outputs, groups), (1, 1), (1,), ())
        _check_groups(codes, inputs, groups)
        if codes.dtype != "I8":
            layer.refuse(ZERO, "fp8")
        elif ZERO in layer.parts:
            check_shape(layer.part(ZERO, ("I8", *FLOATS)), scales.shape)

    def form(self, layer: Layer) -> None:
        """Return None: fp16 offsets for the zeros would change the weights."""

    def read(self, layer: Layer) -> Grouped:
        """Return the weights [outputs, inputs] of a checked layer."""
        codes, scales = layer.parts[CODES].read(), layer.parts[SCALE].read()
        if self._is_packed:
            return _int4(codes, scales, layer.parts[ZERO].read())
        groups = _groups(layer)
        scales = scales.reshape(-1, groups)
        if ZERO not in layer.parts:
            return Grouped(codes, scales)
        zeros = layer.parts[ZERO].read().float().reshape(-1, groups)
        return Grouped(codes, scales, zeros)


def _configs(given: Any) -> list[Any]:
    """Return the configurations of the layers that are quantised."""
    if not isinstance(given, dict) or given.get("_type") != BY_NAME:
        return [given]
    data = given.get("_data")
    by_name = data.get("fqn_to_config") if isinstance(data, dict) else None
    if not isinstance(by_name, dict):
        raise refuse("quant_type", given, NAME, "an object with fqn_to_config")
    return [config for config in by_name.values() if config is not None]


def _stored(config: Any) -> str:
    """Return what a configuration stores, of STORED. Raises ConfigError if it is not served."""
    name = config.get("_type") if isinstance(config, dict) else config
    if not isinstance(name, str) or not isinstance(config, dict) or name not in STORED:
        raise refuse("quant_type", name, NAME, ", ".join(STORED))
    data = config.get("_data")
    if not isinstance(data, dict):
        raise refuse("quant_type", config, NAME, "an object with _data")
    for key, plain in PLAIN.items():
        packing = data.get(key, plain)
        if isinstance(packing, dict):
            packing = packing.get("_data")
        choice({key: _upper(packing)}, key, f"{NAME}, {name}", [plain])
    return STORED[name]


def _upper(text: Any) -> Any:
    return text.upper() if isinstance(text, str) else text


def _groups(layer: Layer) -> int:
    """Return the number of groups of inputs, for scales that may be one for all weights."""
    shape = layer.parts[SCALE].shape
    return shape[1] if len(shape) == 2 else 1


def _check_groups(codes: StoredTensor, inputs: int, groups: int) -> None:
    """Raise ConfigError if inputs cannot be split into groups of one size."""
    if groups < 1 or inputs % groups:
        raise ConfigError(
            f"{codes.name} in {codes.file} has {inputs} inputs, not {groups} equal groups of them."
        )


def _int4(packed: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Grouped:
    """Return the weights of Int4Tensor: in fp32, with scales of 1."""
    codes = torch.stack((packed << 4 >> 4, packed >> 4), -1)  # signed: shifts keep the sign
    groups, outputs = scales.shape
    values = codes.reshape(outputs, groups, -1).float()
    values *= scales.float().t()[..., None]
    values += zeros.float().t()[..., None]
    return Grouped(values.flatten(1), torch.ones(outputs, 1))
