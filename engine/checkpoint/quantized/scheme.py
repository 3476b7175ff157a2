"""A config group of compressed-tensors: how the weights of its layers are quantised."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.quantized.layer import FLOATS, Shape
from engine.checkpoint.quantized.settings import Settings, block_size, choice, group_size, refuse

NAME = "compressed-tensors"
PACKED = "pack-quantized"
PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
# Floats with scales for groups of inputs, which are small floats too.
NVFP4, MXFP4, MXFP8 = "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"
MICRO_BITS = {NVFP4: 4, MXFP4: 4, MXFP8: 8}
MICRO_GROUPS = {NVFP4: 16, MXFP4: 32, MXFP8: 32}
FORMATS = (PACKED, *PLAIN, *MICRO_BITS)


def words(count: int, bits: int) -> int:
    """Return the number of words of 32 bits that hold `count` codes."""
    per_word = 32 // bits
    return -(-count // per_word)


@dataclass(frozen=True, slots=True)
class Scheme:
    """Numbers of `bits` with a scale for each tensor, channel (output), group or block."""

    form: str  # one of FORMATS
    is_float: bool  # e4m3, or e2m1 if it has 4 bits
    bits: int
    strategy: str
    group_size: int
    block: tuple[int, int]  # outputs, inputs
    symmetric: bool

    @classmethod
    def of(cls, group: Settings, form: Any) -> Scheme:
        """Read a config group; `form` is the format of the whole checkpoint.

        Raises ConfigError for a variant that is not served.
        """
        form = choice({"format": group.get("format") or form}, "format", NAME, FORMATS)
        weights: dict[str, Any] = group["weights"]
        if form in MICRO_BITS:
            return cls._micro(weights, form)
        is_float = choice(weights, "type", NAME, ["int", "float"]) == "float"
        if is_float and form == PACKED:
            raise refuse("type", "float", f"{NAME} in the format {PACKED}", "int")
        bits = weights.get("num_bits")
        if form == PACKED and type(bits) is int and 0 < bits < 8 and 32 % bits:
            # compressed-tensors 0.15 fills each word with whole codes, 0.20 packs across words.
            layouts = f"which has two layouts of {bits} bits under one name"
            raise refuse("num_bits", bits, f"{NAME} in the format {PACKED}, {layouts}", "4, 8")
        bits = choice(weights, "num_bits", NAME, [8] if is_float else [4, 8])
        strategy = choice(weights, "strategy", NAME, ["tensor", "channel", "group", "block"])
        if strategy == "block" and form == PACKED:
            raise refuse("strategy", "block", f"{NAME} in the format {PACKED}", "group, channel")
        size = group_size(weights, NAME)
        if strategy == "group" and size is None:
            raise refuse("group_size", size, NAME, "a number above 0")
        block = block_size(weights, "block_structure", NAME)
        if strategy == "block" and block is None:
            raise refuse("block_structure", None, NAME, "a list of two numbers above 0")
        return cls(
            form=form,
            is_float=is_float,
            bits=bits,
            strategy=strategy,
            group_size=size or 0,
            block=block or (0, 0),
            symmetric=choice({"symmetric": True, **weights}, "symmetric", NAME, [True, False]),
        )

    @classmethod
    def _micro(cls, weights: Settings, form: str) -> Scheme:
        """Return the scheme of a format with one choice of every setting."""
        name = f"{NAME} in the format {form}"
        bits, size = MICRO_BITS[form], MICRO_GROUPS[form]
        choice(weights, "type", name, ["float"])
        choice(weights, "num_bits", name, [bits])
        choice({"group_size": size, **weights}, "group_size", name, [size])
        strategy = "tensor_group" if form == NVFP4 else "group"
        choice({"strategy": strategy, **weights}, "strategy", name, [strategy])
        choice({"symmetric": True, **weights}, "symmetric", name, [True])
        return cls(form, True, bits, "group", size, (0, 0), symmetric=True)

    @property
    def is_packed(self) -> bool:
        """Whether words of 32 bits hold the codes."""
        return self.form == PACKED

    @property
    def is_micro(self) -> bool:
        """Whether the scales are small floats: of one byte, e4m3 or e8m0."""
        return self.form in MICRO_BITS

    @property
    def dtype(self) -> str:
        """The dtype of stored codes."""
        if self.is_packed:
            return "I32"
        if self.is_float and self.bits == 4:
            return "U8"
        return "F8_E4M3" if self.is_float else "I8"

    @property
    def scale_dtypes(self) -> Sequence[str]:
        """The dtypes that stored scales may have."""
        if self.form == NVFP4:
            return ("F8_E4M3",)
        return ("U8",) if self.is_micro else FLOATS

    def codes_shape(self, outputs: int, inputs: int) -> Shape:
        """Return the shape of a matrix as it is stored."""
        if self.is_packed:
            return outputs, words(inputs, self.bits)
        if self.dtype == "U8":
            return outputs, inputs // 2
        return outputs, inputs

    def scale_shapes(self, outputs: int, inputs: int) -> tuple[Shape, ...]:
        """Return the shapes that the scales of a matrix may have."""
        if self.strategy == "tensor":
            return (), (1,), (1, 1)
        if self.strategy == "channel":
            return (outputs, 1), (outputs,)
        if self.strategy == "group":
            return ((outputs, inputs // self.group_size),)
        height, width = self.block
        return ((-(-outputs // height), -(-inputs // width)),)
