"""Write quantised checkpoints: each format as its definition says, in NumPy.

A writer rounds a matrix, packs the codes, and returns the numbers that the codes stand for. It
shares no code with `engine/checkpoint/quantized`.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.support.quantized_base import (
    E4M3,
    EVEN_FIRST,
    Format,
    Matrix,
    Stored,
    compressed,
    tensor,
)
from tests.support.quantized_floats import FLOAT_FORMATS

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word holds this one of eight outputs


def rounded(
    weight: Matrix, group_of: Matrix, levels: tuple[int, int], *, symmetric: bool
) -> tuple[Matrix, Matrix, Matrix]:
    """Return codes [outputs, inputs], scales and zeros [outputs, groups], rounded to nearest.

    Scales are fp16 numbers in fp32.
    """
    low, high = levels
    groups = int(group_of.max()) + 1
    scales = np.empty((len(weight), groups), np.float32)
    zeros = np.zeros((len(weight), groups), np.int64)
    for group in range(groups):
        part = weight[:, group_of == group]
        if symmetric:
            scale = np.abs(part).max(1) / ((high - low) // 2)
            zeros[:, group] = (high + low + 1) // 2
        else:
            scale = (part.max(1) - part.min(1)) / (high - low)
            zeros[:, group] = np.clip(low - np.round(part.min(1) / scale), max(low, 1 + low), high)
        scales[:, group] = scale.astype(np.float16)
    wide = scales[:, group_of]
    codes = np.clip(np.round(weight / wide) + zeros[:, group_of], low, high).astype(np.int64)
    return codes, scales, zeros


def numbers_of(codes: Matrix, scales: Matrix, zeros: Matrix, group_of: Matrix) -> Matrix:
    found = np.empty(codes.shape, np.float32)
    for column, group in enumerate(group_of):
        whole = (codes[:, column] - zeros[:, group]).astype(np.float32)
        found[:, column] = whole * scales[:, group].astype(np.float32)
    return found


def words(codes: Matrix, bits: int) -> Matrix:
    """Pack [n, count] codes along the last dimension, the first one lowest; pad with zeros."""
    per_word = 32 // bits
    found = np.zeros((len(codes), -(-codes.shape[1] // per_word)), np.uint32)
    for column in range(codes.shape[1]):
        shift = np.uint32(bits * (column % per_word))
        found[:, column // per_word] |= codes[:, column].astype(np.uint32) << shift
    return found.view(np.int32)


def runs(inputs: int, size: int | None) -> Matrix:
    return np.arange(inputs) // (size or inputs)


def fills_groups(size: int | None, *, reorders: bool) -> bool:
    """Return whether all of 32 inputs in order share a scale, as the kernel for codes needs."""
    return not reorders and (size is None or size % 32 == 0)


def awq(size: int | None) -> Format:
    def quantize(weight: Matrix) -> tuple[Stored, Matrix]:
        group_of = runs(weight.shape[1], size)
        codes, scales, zeros = rounded(weight, group_of, (0, 15), symmetric=False)

        def packed(values: Matrix) -> Matrix:  # [n, outputs]
            mixed = values.reshape(len(values), -1, 8)[..., AWQ_ORDER]
            return words(mixed.reshape(values.shape), 4)

        stored = {
            "qweight": tensor(packed(codes.T)),
            "qzeros": tensor(packed(zeros.T)),
            "scales": tensor(scales.T, torch.float16),
        }
        return stored, numbers_of(codes, scales, zeros, group_of)

    settings = {"quant_method": "awq", "bits": 4, "group_size": size or -1, "version": "gemm"}
    return Format(settings | {"zero_point": True, "modules_to_not_convert": None}, quantize)


@dataclass(frozen=True)
class GPTQ:
    bits: int
    size: int | None
    symmetric: bool = True
    reorders: bool = False
    form: str = "gptq"
    has_groups: bool = True

    def quantize(self, weight: Matrix) -> tuple[Stored, Matrix]:
        group_of = runs(weight.shape[1], self.size)
        if self.reorders:
            group_of = np.random.default_rng(5).permutation(group_of)
        levels = 0, 2**self.bits - 1
        codes, scales, zeros = rounded(weight, group_of, levels, symmetric=self.symmetric)
        kept = zeros - (self.form == "gptq")
        stored = {
            "qweight": tensor(words(codes, self.bits).T),
            "qzeros": tensor(words(kept.T, self.bits)),
            "scales": tensor(scales.T, torch.float16),
        }
        if self.has_groups:
            stored["g_idx"] = tensor(group_of, torch.int32)
        return stored, numbers_of(codes, scales, zeros, group_of)

    @property
    def format(self) -> Format:
        settings = {"quant_method": "gptq", "bits": self.bits, "group_size": self.size or -1}
        settings |= {"desc_act": self.reorders, "sym": self.symmetric}
        keeps_codes = fills_groups(self.size, reorders=self.reorders)
        return Format(settings | {"checkpoint_format": self.form}, self.quantize, keeps_codes)


@dataclass(frozen=True)
class Whole:
    """Whole numbers of compressed-tensors."""

    bits: int
    strategy: str
    size: int | None = None
    symmetric: bool = True
    packed: bool = False
    packs_zeros: bool = True
    reorders: bool = False
    unset_groups: bool = False
    form: str = "int-quantized"
    scale_dtype: torch.dtype = field(default=torch.float16)

    def quantize(self, weight: Matrix) -> tuple[Stored, Matrix]:
        if self.strategy == "tensor":
            flat, numbers = self._quantize(weight.reshape(1, -1), weight.shape)
            return flat | {"weight_scale": flat["weight_scale"].reshape(1)}, numbers
        return self._quantize(weight, weight.shape)

    def _quantize(self, weight: Matrix, shape: tuple[int, ...]) -> tuple[Stored, Matrix]:
        group_of = runs(weight.shape[1], self.size)
        if self.reorders:
            group_of = np.random.default_rng(5).permutation(group_of)
        half = 2 ** (self.bits - 1)
        levels = -half, half - 1
        codes, scales, zeros = rounded(weight, group_of, levels, symmetric=self.symmetric)
        numbers = numbers_of(codes, scales, zeros, group_of).reshape(shape)
        codes = codes.reshape(shape)
        stored = {"weight_scale": tensor(scales, self.scale_dtype)}
        if self.packed:
            stored["weight_packed"] = tensor(words(codes + half, self.bits))
            stored["weight_shape"] = torch.tensor(shape)
        else:
            stored["weight"] = tensor(codes, torch.int8)
        if not self.symmetric:
            stored["weight_zero_point"] = tensor(zeros, torch.int8)
            if self.packed and self.packs_zeros:
                stored["weight_zero_point"] = tensor(words((zeros + half).T, self.bits).T)
        if self.reorders:
            stored["weight_g_idx"] = tensor(group_of, torch.int32)
        if self.unset_groups:
            stored["weight_g_idx"] = torch.full((shape[1],), -1, dtype=torch.int32)
        return stored, numbers

    @property
    def format(self) -> Format:
        form = "pack-quantized" if self.packed else self.form
        weights = {"num_bits": self.bits, "type": "int", "strategy": self.strategy}
        weights |= {"group_size": self.size, "symmetric": self.symmetric}
        keeps_codes = fills_groups(self.size, reorders=self.reorders)
        return Format(compressed(form, **weights), self.quantize, keeps_codes)


def fp8(weight: Matrix, height: int, width: int) -> tuple[torch.Tensor, Matrix, Matrix]:
    """Return fp8 codes, scales [blocks, blocks] and numbers."""
    outputs, inputs = weight.shape
    scales = np.empty((-(-outputs // height), -(-inputs // width)), np.float32)
    codes = np.empty(weight.shape, np.uint8)
    numbers = np.empty(weight.shape, np.float32)
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            part = np.s_[row * height : (row + 1) * height, column * width : (column + 1) * width]
            scale = np.float32(np.abs(weight[part]).max() / 448)
            distances = np.abs((weight[part] / scale)[..., None] - E4M3[EVEN_FIRST])
            found = EVEN_FIRST[distances.argmin(-1)]
            codes[part] = found
            numbers[part] = E4M3[found] * scale
            scales[row, column] = scale
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), scales, numbers


@dataclass(frozen=True)
class Floats:
    """fp8 with scales of blocks (outputs, inputs), or of whole dimensions for 0."""

    settings: dict[str, Any]
    height: int
    width: int
    name: str = "weight_scale"
    shape: tuple[int, ...] | None = None  # of the scales

    def quantize(self, weight: Matrix) -> tuple[Stored, Matrix]:
        height, width = self.height or weight.shape[0], self.width or weight.shape[1]
        codes, scales, numbers = fp8(weight, height, width)
        shape = scales.shape if self.shape is None else self.shape
        return {"weight": codes, self.name: tensor(scales.reshape(shape))}, numbers

    @property
    def format(self) -> Format:
        return Format(self.settings, self.quantize, keeps_codes=False)


def float_group(**weights: Any) -> dict[str, Any]:
    given = {"num_bits": 8, "type": "float", "symmetric": True} | weights
    return compressed("float-quantized", **given)


FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
ACTIVATION = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}
FORMATS: dict[str, Format] = {
    "awq": awq(32),
    "awq, a group": awq(None),
    "gptq 4": GPTQ(4, 32).format,
    "gptq 8": GPTQ(8, 32, symmetric=False).format,
    "gptq act order": GPTQ(4, 32, symmetric=False, reorders=True).format,
    "gptq v2": GPTQ(4, None, symmetric=False, form="gptq_v2").format,
    "gptq without g_idx": GPTQ(4, 32, has_groups=False).format,
    "gptq, a short group": GPTQ(4, 40).format,
    "int8 tensor": Whole(8, "tensor").format,
    "int8 channel": Whole(8, "channel").format,
    "int8 group": Whole(8, "group", 32, symmetric=False).format,
    "int8 naive": Whole(8, "channel", form="naive-quantized").format,
    "pack 4": Whole(4, "group", 32, packed=True).format,
    "pack 4 zeros": Whole(4, "group", 32, packed=True, symmetric=False).format,
    "pack 4 plain zeros": Whole(
        4, "group", 32, packed=True, symmetric=False, packs_zeros=False
    ).format,
    "pack 4 act order": Whole(4, "group", 32, packed=True, reorders=True).format,
    "pack 4 unset order": Whole(4, "group", 32, packed=True, unset_groups=True).format,
    "pack 8": Whole(8, "channel", packed=True).format,
    "pack 8 zeros": Whole(8, "channel", packed=True, symmetric=False).format,
    "float tensor": Floats(float_group(strategy="tensor"), 0, 0, shape=(1,)).format,
    "float channel": Floats(float_group(strategy="channel"), 1, 0).format,
    "float block": Floats(float_group(strategy="block", block_structure=[48, 40]), 48, 40).format,
    "fp8 blocks": Floats(
        FP8_BLOCKS | {"weight_block_size": [48, 40]}, 48, 40, "weight_scale_inv"
    ).format,
    "fp8 tensor": Floats(ACTIVATION, 0, 0, shape=()).format,
    "fbgemm": Floats({"quant_method": "fbgemm_fp8"}, 1, 0).format,
    **FLOAT_FORMATS,
}


def write_quantized(source: Path, folder: Path, form: Format, **more: Any) -> dict[str, Matrix]:
    """Write the checkpoint in `source` with quantised linear layers; return their numbers by name.

    `more` are settings of quantization_config.
    """
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"quantization_config": form.settings | more})
    )
    tensors, numbers = {}, {}
    for name, value in load_file(source / "model.safetensors").items():
        if value.dim() < 2 or "embed" in name or "lm_head" in name:
            tensors[name] = value
            continue
        stored, numbers[name] = form.quantize(value.float().numpy())
        base = name.removesuffix("weight")
        tensors |= {base + ending: part.contiguous() for ending, part in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    return numbers
