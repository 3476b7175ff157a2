"""A config group of compressed-tensors: how the weights of its layers are quantised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine.checkpoint.quantized.layer import Shape
from engine.checkpoint.quantized.settings import Settings, block_size, choice, group_size, refuse

NAME = "compressed-tensors"
PACKED = "pack-quantized"
PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
FORMATS = (PACKED, *PLAIN)


def words(count: int, bits: int) -> int:
    """Return the number of words of 32 bits that hold `count` codes."""
    per_word = 32 // bits
    return -(-count // per_word)


@dataclass(frozen=True, slots=True)
class Scheme:
    """Numbers of `bits` with a scale for each tensor, channel (output), group or block."""

    is_packed: bool
    is_float: bool  # e4m3
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
            is_packed=form == PACKED,
            is_float=is_float,
            bits=bits,
            strategy=strategy,
            group_size=size or 0,
            block=block or (0, 0),
            symmetric=choice({"symmetric": True, **weights}, "symmetric", NAME, [True, False]),
        )

    @property
    def dtype(self) -> str:
        """The dtype of stored codes."""
        if self.is_packed:
            return "I32"
        return "F8_E4M3" if self.is_float else "I8"

    def codes_shape(self, outputs: int, inputs: int) -> Shape:
        """Return the shape of a matrix as it is stored."""
        if self.is_packed:
            return outputs, words(inputs, self.bits)
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
