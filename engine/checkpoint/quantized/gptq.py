"""GPTQ: codes of 4 or 8 bits with a scale and a zero for each group of inputs.

The layout is that of AutoGPTQ and GPTQModel (github.com/ModelCloud/GPTQModel).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.checkpoint.quantized.format import StorageFormat
from engine.checkpoint.quantized.groups import Grouped, form_of, unpack
from engine.checkpoint.quantized.layer import (
    FLOATS,
    Layer,
    check_divides,
    check_shape,
    read_groups,
)
from engine.checkpoint.quantized.settings import (
    Settings,
    choice,
    format_of,
    group_size,
    refuse,
)
from engine.ops.quantize import CodesForm

NAME = "gptq"
ZERO_OFFSETS = {"gptq": 1, "gptq_v2": 0}  # the first format stores a zero minus one


@dataclass(frozen=True, slots=True)
class GPTQ(StorageFormat):
    """A layer stores, for words of 32 / bits codes:

    - qweight [inputs / codes per word, outputs] int32;
    - qzeros [groups, outputs / codes per word] int32;
    - scales [groups, outputs] float;
    - g_idx [inputs] int32, the group of each input.

    A weight is (code - zero) * scale. The zero is the stored one plus `zero_offset`, which may be
    2^bits: it is not cut to its bits, as in AutoGPTQ.
    """

    bits: int
    group_size: int | None
    zero_offset: int
    needs_groups: bool  # inputs were quantised in the order of their activations

    kind = NAME
    endings = frozenset({"qweight", "qzeros", "scales", "g_idx"})
    marks = endings

    @classmethod
    def of(cls, settings: Settings) -> GPTQ:
        """Read the settings. Raises ConfigError for a variant that is not served."""
        bits = choice(settings, "bits", NAME, [4, 8])
        form = format_of(settings, ("checkpoint_format", "format"), "gptq")
        choice({"checkpoint_format": form}, "checkpoint_format", NAME, ZERO_OFFSETS)
        choice({"pack_dtype": "int32", **settings}, "pack_dtype", NAME, ["int32"])
        choice({"is_marlin_format": False, **settings}, "is_marlin_format", NAME, [False])
        dynamic = settings.get("dynamic") or {}
        if not isinstance(dynamic, dict):
            raise refuse("dynamic", dynamic, NAME, "an object")
        for pattern in dynamic:
            if not str(pattern).startswith("-:"):  # other ones change the settings of layers
                raise refuse(
                    "dynamic", pattern, NAME, "patterns with -:, which are of plain layers"
                )
        return cls(
            bits=bits,
            group_size=group_size(settings, NAME),
            zero_offset=ZERO_OFFSETS[form],
            needs_groups=bool(settings.get("desc_act")),
        )

    def check(self, layer: Layer) -> None:
        """Raise ConfigError if the tensors of a layer do not fit each other."""
        codes = layer.part("qweight", ("I32",), 2)
        words, outputs = codes.shape
        per_word = 32 // self.bits
        inputs = words * per_word
        check_divides(codes, outputs, per_word, "outputs")
        groups = -(-inputs // (self.group_size or inputs))
        check_shape(layer.part("qzeros", ("I32",)), (groups, outputs // per_word))
        check_shape(layer.part("scales", FLOATS), (groups, outputs))
        if self.needs_groups or "g_idx" in layer.parts:
            check_shape(layer.part("g_idx", ("I32", "I64")), (inputs,))

    def form(self, layer: Layer) -> CodesForm | None:
        """Return how the codes of a checked layer can be kept."""
        inputs = layer.parts["qweight"].shape[0] * 32 // self.bits
        groups = layer.parts["scales"].shape[0]
        if inputs % groups or self._groups(layer, inputs, groups) is not None:
            return None
        return form_of(self.bits, inputs, groups, has_zeros=True)

    def read(self, layer: Layer) -> Grouped:
        """Return the weights [outputs, inputs] of a checked layer."""
        codes = unpack(layer.parts["qweight"].read().t(), self.bits)
        scales = layer.parts["scales"].read().t()
        zeros = unpack(layer.parts["qzeros"].read(), self.bits).t()
        zeros = zeros.float() + self.zero_offset
        groups = self._groups(layer, codes.shape[1], scales.shape[1])
        return Grouped(codes, scales, zeros, groups)

    def _groups(self, layer: Layer, inputs: int, groups: int) -> torch.Tensor | None:
        """Return the group of each input; None if they are equal runs."""
        indices = torch.arange(inputs)
        group_of = indices // (self.group_size or inputs)
        if "g_idx" in layer.parts:
            group_of = read_groups(layer.parts["g_idx"], groups)
        if inputs % groups:
            return group_of
        runs = indices // (inputs // groups)
        return None if torch.equal(group_of, runs) else group_of
