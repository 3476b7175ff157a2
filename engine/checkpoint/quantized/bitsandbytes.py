"""bitsandbytes, 4 bits: nf4 and fp4, with double quantisation or not.

The layout is that of Linear4bit.state_dict() (github.com/bitsandbytes-foundation/bitsandbytes).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from engine.checkpoint.bounded_json import BAD_JSON, loads
from engine.checkpoint.quantized.format import StorageFormat
from engine.checkpoint.quantized.groups import Grouped
from engine.checkpoint.quantized.layer import OF_WEIGHT, Layer, check_shape
from engine.checkpoint.quantized.settings import Settings, choice
from engine.errors import ConfigError

NAME = "bitsandbytes"
WORDS = ("U8", "I8", "F16", "BF16", "F32")  # bnb_4bit_quant_storage: the bytes have this dtype
STATE = ".quant_state.bitsandbytes__"
MAX_STATE = 10_000  # bytes; some 170 are usual
MAX_BLOCK = 1 << 20
# The numbers of the codes, which bitsandbytes also stores as quant_map: of nf4 the quantiles of
# Table 5 in arXiv 2305.14314, of fp4 floats of two bits of exponent and one of fraction.
FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)
CODES = {
    "nf4": (
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
    "fp4": (*(number / 12 for number in FP4), *(-number / 12 for number in FP4)),
}


@dataclass(frozen=True, slots=True)
class State:
    """The settings of a layer, of the JSON in its quant_state."""

    kind: str  # of CODES
    shape: tuple[int, int]  # outputs, inputs
    block: int  # weights that share a scale, counted through all rows
    nested: Nested | None

    @property
    def blocks(self) -> int:
        """The number of scales."""
        return -(-math.prod(self.shape) // self.block)


@dataclass(frozen=True, slots=True)
class Nested:
    """How the scales of a layer are quantised: a scale is map[code] * nested scale + offset."""

    block: int  # scales that share a nested scale
    offset: float


@dataclass(frozen=True, slots=True)
class BitsAndBytes(StorageFormat):
    """A layer stores, for its weights one row after another, in blocks:

    - weight: bytes of two codes each, the first one in the upper four bits;
    - weight.quant_map [16] fp32, the numbers of the codes;
    - weight.absmax [blocks] fp32, or with double quantisation uint8, and then
      weight.nested_absmax [blocks / nested block] and weight.nested_quant_map [256], both fp32;
    - weight.quant_state.bitsandbytes__nf4 or __fp4, the bytes of a JSON object, see `State`.

    A weight is quant_map[code] * absmax.
    """

    kind = NAME
    names = OF_WEIGHT
    endings = frozenset(
        {
            "",
            ".absmax",
            ".quant_map",
            ".nested_absmax",
            ".nested_quant_map",
            *(STATE + name for name in CODES),
        }
    )
    marks = endings - {""}

    @classmethod
    def of(cls, settings: Settings) -> BitsAndBytes:
        """Read the settings. Raises ConfigError for 8 bits."""
        choice({"load_in_8bit": False, **settings}, "load_in_8bit", NAME, [False])
        choice({"load_in_4bit": True, **settings}, "load_in_4bit", NAME, [True])
        return cls()

    def check(self, layer: Layer) -> None:
        """Raise ConfigError if the tensors of a layer do not fit each other."""
        state = _state_of(layer)
        weight = layer.part("", WORDS)
        if weight.size != -(-math.prod(state.shape) // 2):
            raise ConfigError(
                f"{weight.name} in {weight.file} has {weight.size} bytes; its quant_state asks for "
                f"{list(state.shape)} codes of 4 bits."
            )
        _check_map(layer, state)
        nested = state.nested
        check_shape(layer.part(".absmax", ("F32",) if nested is None else ("U8",)), (state.blocks,))
        if nested is None:
            for ending in (".nested_absmax", ".nested_quant_map"):
                layer.refuse(ending, "a quant_state without nested_blocksize")
            return
        check_shape(layer.part(".nested_quant_map", ("F32",)), (256,))
        check_shape(layer.part(".nested_absmax", ("F32",)), (-(-state.blocks // nested.block),))

    def form(self, layer: Layer) -> None:
        """Return None: there is no kernel for its codes."""

    def read(self, layer: Layer) -> Grouped:
        """Return the weights [outputs, inputs] of a checked layer, with fp32 numbers as codes."""
        state = _state_of(layer)
        outputs, inputs = state.shape
        packed = layer.parts[""].read().reshape(-1).view(torch.uint8)
        codes = torch.stack((packed >> 4, packed & 15), -1).flatten()[: outputs * inputs]
        numbers = _table(state.kind)[codes.int()].reshape(outputs, inputs)
        scales = _scales(layer, state)
        if inputs % state.block:  # blocks go from one row to the next: a scale for each weight
            scales = scales.repeat_interleave(state.block)[: outputs * inputs]
        return Grouped(numbers, scales.reshape(outputs, -1))


def _table(kind: str) -> torch.Tensor:
    return torch.tensor(CODES[kind], dtype=torch.float32)


def _check_map(layer: Layer, state: State) -> None:
    """Raise ConfigError if the stored numbers of the codes are not those of the kind."""
    stored = layer.part(".quant_map", ("F32",))
    check_shape(stored, (16,))
    if not torch.equal(stored.read(), _table(state.kind)):
        raise ConfigError(
            f"{stored.name} in {stored.file} does not have the numbers of {state.kind}."
        )


def _scales(layer: Layer, state: State) -> torch.Tensor:
    """Return the scales [blocks] in fp32."""
    stored = layer.parts[".absmax"].read()
    if state.nested is None:
        return stored
    numbers = layer.parts[".nested_quant_map"].read()[stored.int()]
    nested = layer.parts[".nested_absmax"].read().repeat_interleave(state.nested.block)
    return numbers * nested[: state.blocks] + state.nested.offset


def _state_of(layer: Layer) -> State:
    """Return the settings of a layer. Raises ConfigError if they are missing or not as expected."""
    kinds = [kind for kind in CODES if STATE + kind in layer.parts]
    if not kinds:
        layer.part(STATE + "nf4", ("U8",))
    layer.refuse_both(STATE + "nf4", STATE + "fp4")
    stored = layer.part(STATE + kinds[0], ("U8",), 1)
    try:
        if stored.size > MAX_STATE:
            raise ValueError(f"it has {stored.size} bytes; at most {MAX_STATE} are read")
        return _parsed(loads(stored.read().numpy().tobytes()), kinds[0])
    except BAD_JSON as error:
        raise ConfigError(f"{stored.name} in {stored.file} is not usable: {error}") from error


def _parsed(state: Any, kind: str) -> State:
    """Return the settings in a JSON value. Raises ValueError if they are not as expected."""
    if not isinstance(state, dict) or state.get("quant_type") != kind:
        raise ValueError(f"it is no object with quant_type {kind}")
    shape = state.get("shape")
    if not isinstance(shape, list) or len(shape) != 2:
        raise ValueError(f"shape is {shape!r:.99}; supported: two numbers")
    outputs, inputs = (_count(size, "shape") for size in shape)
    nested = None
    if "nested_blocksize" in state:
        offset = state.get("nested_offset")
        if type(offset) is not float:
            raise ValueError(f"nested_offset is {offset!r:.99}; it must be a number")
        nested = Nested(_count(state["nested_blocksize"], "nested_blocksize"), offset)
    return State(kind, (outputs, inputs), _count(state.get("blocksize"), "blocksize"), nested)


def _count(value: Any, key: str) -> int:
    if type(value) is not int or not 0 < value <= MAX_BLOCK:
        raise ValueError(f"{key} has {value!r:.99}; it must be from 1 to {MAX_BLOCK}")
    return value
