"""AWQ, version gemm: codes of 4 bits with a scale and a zero for each group of inputs.

The layout is that of AutoAWQ's WQLinear_GEMM (github.com/casper-hansen/AutoAWQ).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.checkpoint.quantized.format import StorageFormat
from engine.checkpoint.quantized.groups import Grouped, form_of
from engine.checkpoint.quantized.layer import FLOATS, Layer, check_divides, check_shape
from engine.checkpoint.quantized.settings import Settings, choice, format_of, group_size
from engine.ops.quantize import CodesForm

NAME = "awq"
BITS, PER_WORD = 4, 8
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # outputs of a word, the lowest bits first


@dataclass(frozen=True, slots=True)
class AWQ(StorageFormat):
    """A layer stores, for inputs in groups:

    - qweight [inputs, outputs / 8] int32;
    - qzeros [groups, outputs / 8] int32;
    - scales [groups, outputs] float.

    A weight is (code - zero) * scale.
    """

    group_size: int | None

    kind = NAME
    endings = frozenset({"qweight", "qzeros", "scales"})
    marks = endings

    @classmethod
    def of(cls, settings: Settings) -> AWQ:
        """Read the settings. Raises ConfigError for a variant that is not served."""
        choice(settings, "bits", NAME, [BITS])
        form = format_of(settings, ("version", "format", "checkpoint_format"), "gemm")
        choice({"version": form}, "version", NAME, ["gemm"])
        choice({"zero_point": True, **settings}, "zero_point", NAME, [True])
        return cls(group_size(settings, NAME))

    def check(self, layer: Layer) -> None:
        """Raise ConfigError if the tensors of a layer do not fit each other."""
        codes = layer.part("qweight", ("I32",), 2)
        inputs, words = codes.shape
        size = self.group_size or inputs
        check_divides(codes, inputs, size, "inputs")
        check_shape(layer.part("qzeros", ("I32",)), (inputs // size, words))
        check_shape(layer.part("scales", FLOATS), (inputs // size, words * PER_WORD))

    def form(self, layer: Layer) -> CodesForm | None:
        """Return how the codes of a checked layer can be kept."""
        groups = layer.parts["scales"].shape[0]
        return form_of(BITS, layer.parts["qweight"].shape[0], groups, has_zeros=True)

    def read(self, layer: Layer) -> Grouped:
        """Return the weights [outputs, inputs] of a checked layer."""
        codes = _unpack(layer.parts["qweight"].read())
        zeros = _unpack(layer.parts["qzeros"].read())
        return Grouped(codes, layer.parts["scales"].read().t(), zeros)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """[n, outputs / 8] int32 -> [outputs, n] uint8 codes."""
    words = words.t().contiguous()
    codes = torch.empty(len(words), PER_WORD, words.shape[1], dtype=torch.uint8)
    for index, output in enumerate(ORDER):
        codes[:, output] = words >> BITS * index & 15
    return codes.flatten(0, 1)
