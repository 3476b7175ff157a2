"""The weight matrices of quantised layers, under the names of a Hugging Face checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.checkpoint.quantized.format import StorageFormat
from engine.checkpoint.quantized.layer import Layer
from engine.checkpoint.stored import StoredTensor
from engine.errors import ConfigError
from engine.ops.quantize import Codes, CodesForm

CODES = ("I8", "F8_E4M3")  # dtypes of `weight` that mean a quantised layer
OF_KV_CACHE = ("k_scale", "v_scale", "q_scale", "kv_scale", "k_zero_point", "v_zero_point")


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A weight matrix that a checkpoint stores as the tensors of a quantised layer."""

    layer: Layer
    storage: StorageFormat

    @property
    def file(self) -> Path:
        """The file of the layer's first tensor; the other ones may be in another one."""
        return next(iter(self.layer.parts.values())).file

    @property
    def kind(self) -> str:
        return self.storage.kind

    @property
    def form(self) -> CodesForm | None:
        """How `codes` keeps the tensor; None if it cannot."""
        return self.storage.form(self.layer)

    def codes(self) -> Codes:
        """Return the stored codes, of a tensor with a form, with scales rounded to fp16."""
        form = self.form
        assert form is not None
        return self.storage.read(self.layer).regrouped(form)

    def read(self) -> torch.Tensor:
        """Return the weights [outputs, inputs] in fp32."""
        return self.storage.read(self.layer).dequantize()


def original_tensors(
    stored: Mapping[str, StoredTensor], storage: StorageFormat
) -> dict[str, StoredTensor | QuantizedTensor]:
    """Return the tensors of the checkpoint that was quantised, by name, in the order of the files.

    Scales of activations and of the KV cache are left out: both are computed in the dtype that is
    served. Raises ConfigError if the tensors of a layer do not fit each other or config.json.
    """
    layers = _layers_of(stored, storage)
    found: dict[str, StoredTensor | QuantizedTensor] = {}
    for name, tensor in stored.items():
        base, _, ending = name.rpartition(storage.names.separator)
        if base in layers and ending in storage.endings:
            weight = base + storage.names.weight
            found.setdefault(weight, QuantizedTensor(layers[base], storage))
            continue
        is_of_inputs = base in layers and ending in storage.unused
        is_of_kv_cache = storage.has_kv_scales and ending in OF_KV_CACHE
        if not is_of_inputs and not is_of_kv_cache:
            found[name] = tensor
    for layer in layers.values():
        storage.check(layer)
    return found


def _layers_of(stored: Mapping[str, StoredTensor], storage: StorageFormat) -> dict[str, Layer]:
    """Return the quantised layers by name. Raises ConfigError if one has a plain weight too."""
    names = set()
    for name, tensor in stored.items():
        base, _, ending = name.rpartition(storage.names.separator)
        holds_codes = ending == "weight" and ending in storage.endings and tensor.dtype in CODES
        if ending in storage.marks or holds_codes:
            names.add(base)
    parts: dict[str, dict[str, StoredTensor]] = {name: {} for name in names}
    for name, tensor in stored.items():
        base, _, ending = name.rpartition(storage.names.separator)
        if base in names and ending in storage.endings:
            parts[base][ending] = tensor
        elif base in names and ending == "weight":
            raise ConfigError(f"{name} in {tensor.file} is stored twice: plain and quantised.")
    return {name: Layer(name, found, storage.names) for name, found in parts.items()}
