"""fp8 of Qwen3 and Llama checkpoints: e4m3 with scales of blocks, outputs or tensors."""

from __future__ import annotations

from dataclasses import dataclass

from engine.checkpoint.quantized.format import StorageFormat
from engine.checkpoint.quantized.groups import Grouped, in_blocks
from engine.checkpoint.quantized.layer import FLOATS, Layer, check_shape
from engine.checkpoint.quantized.settings import Settings, block_size, choice

NAME = "fp8"
SCALES = ("weight_scale_inv", "weight_scale")


@dataclass(frozen=True, slots=True)
class FP8(StorageFormat):
    """A layer stores weight [outputs, inputs] fp8, and its scales under one of two names.

    They are weight_scale_inv, as of DeepSeek and Qwen3, or weight_scale. A weight is the stored one
    * scale under both. Scales are [outputs / height, inputs / width], rounded up, if there are
    blocks; else one, or [outputs, 1].
    """

    block: tuple[int, int] | None  # height and width
    has_kv_scales: bool

    kind = NAME
    endings = frozenset({"weight", *SCALES})
    marks = frozenset(SCALES)
    unused = frozenset({"input_scale", "activation_scale", "output_scale", "input_scale_ub"})

    @classmethod
    def of(cls, settings: Settings) -> FP8:
        """Read the settings. Raises ConfigError for a variant that is not served."""
        choice({"fmt": "e4m3", **settings}, "fmt", NAME, ["e4m3"])
        return cls(
            block_size(settings, "weight_block_size", NAME), bool(settings.get("kv_cache_scheme"))
        )

    def check(self, layer: Layer) -> None:
        """Raise ConfigError if the tensors of a layer do not fit each other."""
        layer.refuse_both(*SCALES)
        codes = layer.part("weight", ("F8_E4M3",), 2)
        scales = layer.part(_scale_name(layer), FLOATS)
        outputs, inputs = codes.shape
        if self.block:
            height, width = self.block
            check_shape(scales, (-(-outputs // height), -(-inputs // width)))
        else:
            check_shape(scales, (), (1,), (1, 1), (outputs, 1), (outputs,))

    def form(self, layer: Layer) -> None:
        """Return None: there is no kernel for its codes."""

    def read(self, layer: Layer) -> Grouped:
        """Return the weights [outputs, inputs] of a checked layer."""
        codes = layer.parts["weight"].read()
        scales = layer.parts[_scale_name(layer)].read()
        if self.block:
            return in_blocks(codes, scales, *self.block)
        return Grouped(codes, scales.reshape(-1, 1))


def _scale_name(layer: Layer) -> str:
    if "weight_scale" in layer.parts:
        return "weight_scale"
    return "weight_scale_inv"
