"""Quantised layers against their definitions in NumPy: equal bit by bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.quantized.awq import AWQ
from engine.checkpoint.quantized.formats import STORAGE_FORMATS, storage_format
from engine.checkpoint.quantized.groups import ROWS, unpack
from engine.checkpoint.quantized.layer import Layer
from engine.checkpoint.quantized.tensors import QuantizedTensor, original_tensors
from engine.checkpoint.stored import stored_tensors
from tests.support.quantized_base import Format
from tests.support.quantized_files import FORMATS, Whole

SHAPE = 48, 96  # outputs, inputs


def matrix(outputs: int, inputs: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(outputs, inputs)).astype(np.float32)


def both(form: Format, folder: Path, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers that are read, and those that are due."""
    tensor, due = written(form, folder, weight)
    return tensor.read().numpy(), due


def written(form: Format, folder: Path, weight: np.ndarray) -> tuple[QuantizedTensor, np.ndarray]:
    """Return the tensor that is found, and the numbers that are due."""
    stored, due = form.quantize(weight)
    named = {f"block.up.{ending}": part.contiguous() for ending, part in stored.items()}
    save_file({"norm.weight": torch.ones(4), **named}, folder / "model.safetensors")
    method = storage_format({"quantization_config": form.settings})
    assert method
    found = original_tensors(stored_tensors([folder / "model.safetensors"]), method)
    assert found.keys() == {"norm.weight", "block.up.weight"}
    tensor = found["block.up.weight"]
    assert isinstance(tensor, QuantizedTensor)
    return tensor, due


def test_every_method_has_an_entry_in_formats() -> None:
    """Only mxfp4 is tested elsewhere: with the experts of gpt-oss."""
    written_here = {form.settings["quant_method"] for form in FORMATS.values()}
    assert written_here == STORAGE_FORMATS.keys() - {"mxfp4"}


@pytest.mark.parametrize("name", FORMATS)
def test_codes_in_groups_of_32_are_the_same_numbers(name: str, tmp_path: Path) -> None:
    """But for scales and offsets rounded to fp16."""
    tensor, due = written(FORMATS[name], tmp_path, matrix(*SHAPE))
    assert (tensor.form is not None) == FORMATS[name].keeps_codes
    if tensor.form is None:
        return
    codes = tensor.codes()
    assert codes.form == tensor.form
    assert codes.codes.shape == SHAPE
    assert int(codes.codes.max()) < 1 << codes.bits
    assert np.abs(codes.dequantize().numpy() - due).max() < 2e-3 * np.abs(due).max()


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_equal_the_definition(name: str, tmp_path: Path) -> None:
    weight = matrix(*SHAPE)
    found, due = both(FORMATS[name], tmp_path, weight)
    assert found.dtype == np.float32
    assert np.array_equal(found.view(np.int32), due.view(np.int32))
    error = FORMATS[name].error
    stored, _ = FORMATS[name].quantize(weight)
    bits = 8 * max(part.nbytes for part in stored.values()) / weight.size
    assert np.abs(found - weight).max() < (error or max(7.2 / 2**bits, 0.2))


@pytest.mark.parametrize("name", ["gptq act order", "pack 4 act order", "fp8 blocks"])
def test_numbers_of_many_outputs_equal_the_definition(name: str, tmp_path: Path) -> None:
    """Scales of groups in any order are spread for ROWS outputs at a time."""
    found, due = both(FORMATS[name], tmp_path, matrix(ROWS + 40, 96))
    assert np.array_equal(found.view(np.int32), due.view(np.int32))


@pytest.mark.parametrize(("outputs", "inputs"), [(192, 128), (192, 320), (128, 192), (129, 257)])
def test_fp8_blocks_that_are_cut_off_keep_their_size(
    outputs: int, inputs: int, tmp_path: Path
) -> None:
    """192 outputs are a block of 128 and one of 64; transformers 5.24 makes two of 96."""
    codes = torch.from_numpy(matrix(outputs, inputs)).to(torch.float8_e4m3fn)
    down, across = -(-outputs // 128), -(-inputs // 128)
    scales = torch.arange(1.0, down * across + 1).reshape(down, across) / 8
    tensors = {"up.weight": codes, "up.weight_scale_inv": scales}
    save_file(tensors, tmp_path / "model.safetensors")
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    method = storage_format({"quantization_config": settings})
    assert method
    read = original_tensors(stored_tensors([tmp_path / "model.safetensors"]), method)
    found = read["up.weight"].read()
    due = torch.empty(outputs, inputs)
    for row in range(outputs):
        for column in range(inputs):
            due[row, column] = codes[row, column].float() * scales[row // 128, column // 128]
    assert torch.equal(found, due)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_rows_that_do_not_fill_words_are_padded(bits: int, symmetric: bool, tmp_path: Path) -> None:
    """13 outputs and 45 inputs fill neither words of 8 codes nor of 4."""
    form = Whole(bits, "group", 15, packed=True, symmetric=symmetric).format
    found, due = both(form, tmp_path, matrix(13, 45))
    assert np.array_equal(found.view(np.int32), due.view(np.int32))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_of_every_dtype_are_multiplied_in_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    form = Whole(8, "channel", scale_dtype=dtype).format
    stored, _ = form.quantize(matrix(*SHAPE))
    found, _ = both(form, tmp_path, matrix(*SHAPE))
    due = stored["weight"].double() * stored["weight_scale"].double()
    assert np.array_equal(found, due.float().numpy())


def test_words_hold_the_first_code_lowest() -> None:
    words = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32)  # 0xFEDCBA98
    assert unpack(words, 4).tolist() == [list(range(16))]
    assert unpack(words, 8).tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]


def test_awq_takes_outputs_from_a_word_in_its_order(tmp_path: Path) -> None:
    """The word 0x76543210 holds outputs 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits on."""
    parts = {
        "x.qweight": torch.tensor([[0x76543210]], dtype=torch.int32),
        "x.qzeros": torch.tensor([[0]], dtype=torch.int32),
        "x.scales": torch.ones(1, 8, dtype=torch.float16),
    }
    save_file(parts, tmp_path / "x.safetensors")
    stored = stored_tensors([tmp_path / "x.safetensors"])
    layer = Layer("x", {name.removeprefix("x."): part for name, part in stored.items()})
    assert AWQ(None).read(layer).dequantize().flatten().tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_gptq_zero_is_not_cut_to_its_bits(tmp_path: Path) -> None:
    """A stored zero of 15 is the zero 16 in the first format, as AutoGPTQ computes it."""
    form = FORMATS["gptq 4"]
    stored, _ = form.quantize(matrix(8, 32))
    stored["qzeros"] = torch.full_like(stored["qzeros"], -1)
    stored["qweight"] = torch.zeros_like(stored["qweight"])
    stored["scales"] = torch.ones_like(stored["scales"])
    found, _ = both(Format(form.settings, lambda weight: (stored, weight)), tmp_path, matrix(8, 32))
    assert (found == -16).all()
