"""mxfp4 of gpt-oss: groups of 32 numbers of 4 bits (e2m1), with scales that are powers of two.

The format is OCP's Microscaling (MX) specification, version 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.quantized.format import StorageFormat
from engine.checkpoint.quantized.groups import Grouped, form_of
from engine.checkpoint.quantized.layer import OF_PARAMETER, Layer, check_shape
from engine.checkpoint.quantized.settings import Settings
from engine.checkpoint.quantized.small_floats import e2m1, e8m0
from engine.ops.quantize import GROUP, CodesForm

NAME = "mxfp4"


@dataclass(frozen=True, slots=True)
class MXFP4(StorageFormat):
    """A layer stores the matrices of all experts.

    - blocks [experts, outputs, groups, 16] uint8: 32 codes, the lower half of a byte first
    - scales [experts, outputs, groups] uint8: exponents of 2, plus 127
    """

    names = OF_PARAMETER
    kind = NAME
    endings = frozenset({"blocks", "scales"})
    marks = frozenset({"blocks"})

    @classmethod
    def of(cls, settings: Settings) -> MXFP4:
        """Return the format, which has no variants."""
        return cls()

    def check(self, layer: Layer) -> None:
        """Raise ConfigError if the tensors of a layer do not fit each other."""
        blocks = layer.part("blocks", ("U8",), 4)
        experts, outputs, groups, _ = blocks.shape
        check_shape(blocks, (experts, outputs, groups, GROUP // 2))
        check_shape(layer.part("scales", ("U8",)), (experts, outputs, groups))

    def form(self, layer: Layer) -> CodesForm | None:
        """Return that of 8 bits: its steps hold all numbers of a group without another rounding."""
        groups = layer.parts["blocks"].shape[2]
        return form_of(8, GROUP * groups, groups, has_zeros=False)

    def read(self, layer: Layer) -> Grouped:
        """Return the weights [experts * outputs, inputs] of a checked layer."""
        packed = layer.parts["blocks"].read().flatten(0, 1).flatten(1)
        return e2m1(packed, e8m0(layer.parts["scales"].read().flatten(0, 1)))
