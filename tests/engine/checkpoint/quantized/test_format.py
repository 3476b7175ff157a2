"""A storage format is one class and one line: an imaginary one of 3 bits, added here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch

from engine.checkpoint.quantized.format import StorageFormat
from engine.checkpoint.quantized.formats import STORAGE_FORMATS
from engine.checkpoint.quantized.groups import Grouped, form_of
from engine.checkpoint.quantized.layer import Layer, check_divides, check_shape
from engine.checkpoint.quantized.settings import Settings, choice
from engine.checkpoint.tensors import checkpoint_tensors
from engine.errors import ConfigError
from engine.ops.quantize import CodesForm
from tests.engine.checkpoint.quantized.test_models import check, llama
from tests.support.quantized_base import Format, Matrix, Stored, tensor
from tests.support.quantized_files import FORMATS, write_quantized

__all__ = ["llama"]
pytestmark = pytest.mark.usefixtures("one_thread")
NAME, GROUP = "three-bits", 32


@dataclass(frozen=True, slots=True)
class ThreeBits(StorageFormat):
    """A layer stores planes [outputs, 3, inputs / 8] uint8 and scales [outputs, inputs / 32] fp16.

    Plane b has bit b of the codes, the first input lowest. A weight is (code - 4) * scale.
    """

    kind = NAME
    endings = frozenset({"planes", "scales"})
    marks = frozenset({"planes"})

    @classmethod
    def of(cls, settings: Settings) -> Self:
        choice(settings, "bits", NAME, [3])
        return cls()

    def check(self, layer: Layer) -> None:
        planes = layer.part("planes", ("U8",), 3)
        outputs, _, size = planes.shape
        check_shape(planes, (outputs, 3, size))
        check_divides(planes, 8 * size, GROUP, "inputs")
        check_shape(layer.part("scales", ("F16",)), (outputs, 8 * size // GROUP))

    def form(self, layer: Layer) -> CodesForm | None:
        groups = layer.parts["scales"].shape[1]
        return form_of(4, GROUP * groups, groups, has_zeros=False)

    def read(self, layer: Layer) -> Grouped:
        planes = layer.parts["planes"].read()
        bits = planes[..., None] >> torch.arange(8, dtype=torch.uint8) & 1
        low, middle, high = bits.flatten(2).unbind(1)
        codes = (low | middle << 1 | high << 2).view(torch.int8) - 4
        return Grouped(codes, layer.parts["scales"].read())


def write_three_bits(weight: Matrix) -> tuple[Stored, Matrix]:
    outputs, inputs = weight.shape
    groups = weight.reshape(outputs, -1, GROUP)
    scales = (np.abs(groups).max(-1, keepdims=True) / 3).astype(np.float16)
    steps = np.rint(groups / scales.astype(np.float32)).clip(-4, 3)
    codes = (steps + 4).astype(np.uint8).reshape(outputs, inputs)
    planes = [np.packbits(codes >> bit & 1, axis=1, bitorder="little") for bit in range(3)]
    stored = {"planes": tensor(np.stack(planes, 1)), "scales": tensor(scales[..., 0])}
    return stored, (steps * scales.astype(np.float32)).reshape(outputs, inputs)


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STORAGE_FORMATS, NAME, ThreeBits)
    settings = {"quant_method": NAME, "bits": 3}
    monkeypatch.setitem(FORMATS, NAME, Format(settings, write_three_bits))


def test_format_of_one_class_is_served(llama: tuple[object, Path], tmp_path: Path) -> None:
    check(llama, tmp_path / "model", NAME)


def test_format_of_one_class_keeps_its_codes(llama: tuple[object, Path], tmp_path: Path) -> None:
    numbers = write_quantized(llama[1], tmp_path / "model", FORMATS[NAME])
    tensors = checkpoint_tensors(tmp_path / "model")
    for name, due in numbers.items():
        codes = tensors[name].codes()
        assert codes.form == CodesForm(4, has_offsets=False)
        assert np.array_equal(codes.dequantize().numpy(), due)
        assert tensors[name].kind == NAME


def test_variant_that_the_class_does_not_read_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"bits = 2 .*three-bits; supported: 3"):
        STORAGE_FORMATS[NAME].of({"bits": 2})


def test_class_without_a_method_is_not_a_format() -> None:
    class Half(StorageFormat):
        kind = "half"

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]
