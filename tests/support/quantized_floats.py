"""Write quantised checkpoints of small floats, and of libraries: modelopt, bitsandbytes, torchao.

Each format is written as its definition says, in NumPy. `tests/engine/checkpoint/quantized/
test_libraries.py` compares the reader with the libraries.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tests.support.quantized_base import E4M3, Format, Matrix, Stored, compressed, tensor

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
# arXiv 2305.14314, appendix E.
NF4 = [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635]
NF4 += [-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725]
NF4 += [0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941]
NF4 += [0.7229568362236023, 1.0]
FP4 = [sign * number / 12 for sign in (1, -1) for number in (0, 0.0625, 8, 12, 4, 6, 2, 3)]
BLOCK, NESTED_BLOCK = 64, 8  # of bitsandbytes, which takes 256 scales for a nested one


def nearest(values: Matrix, table: Matrix) -> Matrix:
    return np.abs(values[..., None] - table).argmin(-1).astype(np.uint8)


def grouped(weight: Matrix, size: int) -> Matrix:
    return weight.reshape(len(weight), -1, size)


def in_pairs(codes: Matrix) -> torch.Tensor:
    """Pack two codes of 4 bits into a byte, the first one in the lower bits."""
    return tensor(codes[:, 0::2] | codes[:, 1::2] << 4)


def four_bits(weight: Matrix, scales: Matrix) -> tuple[torch.Tensor, Matrix]:
    """Return packed e2m1 codes for scales [outputs, groups], and their numbers."""
    groups = grouped(weight, weight.shape[1] // scales.shape[1])
    codes = nearest(groups / scales[..., None], E2M1)
    numbers = E2M1[codes] * scales[..., None].astype(np.float32)
    return in_pairs(codes.reshape(weight.shape)), numbers.reshape(weight.shape)


def powers_of_two(weight: Matrix, largest: float) -> tuple[torch.Tensor, Matrix]:
    """Return exponents plus 127 as bytes, and the scales, for groups of 32."""
    exponents = np.ceil(np.log2(np.abs(grouped(weight, 32)).max(-1) / largest))
    return tensor((exponents + 127).astype(np.uint8)), (2.0**exponents).astype(np.float32)


def mxfp4(weight: Matrix) -> tuple[torch.Tensor, torch.Tensor, Matrix]:
    exponents, scales = powers_of_two(weight, 6)
    packed, numbers = four_bits(weight, scales)
    return packed, exponents, numbers


def mxfp8(weight: Matrix) -> tuple[Stored, Matrix]:
    exponents, scales = powers_of_two(weight, 448)
    groups = grouped(weight, 32) / scales[..., None]
    codes = nearest(groups, E4M3)
    numbers = (E4M3[codes] * scales[..., None]).reshape(weight.shape)
    stored = torch.from_numpy(codes.reshape(weight.shape)).view(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": exponents}, numbers


def nvfp4_scales(weight: Matrix, whole: np.float32) -> tuple[torch.Tensor, Matrix]:
    """Return e4m3 scales for groups of 16 of a weight divided by `whole`, and their numbers."""
    codes = nearest(np.abs(grouped(weight, 16)).max(-1) / 6 / whole, E4M3[:127])
    return torch.from_numpy(codes).view(torch.float8_e4m3fn), E4M3[codes]


def packed_nvfp4(weight: Matrix) -> tuple[Stored, Matrix]:
    divisor = np.float32(448 * 6 / np.abs(weight).max())
    stored, scales = nvfp4_scales(weight, np.float32(1 / divisor))
    packed, numbers = four_bits(weight, scales / divisor)
    found = {"weight_packed": packed, "weight_scale": stored}
    found["weight_global_scale"] = torch.tensor([divisor])
    return found | {"input_global_scale": torch.tensor([3.0])}, numbers


def packed_mxfp4(weight: Matrix) -> tuple[Stored, Matrix]:
    packed, exponents, numbers = mxfp4(weight)
    return {"weight_packed": packed, "weight_scale": exponents}, numbers


def modelopt_nvfp4(weight: Matrix) -> tuple[Stored, Matrix]:
    factor = np.float32(np.abs(weight).max() / (448 * 6))
    stored, scales = nvfp4_scales(weight, factor)
    packed, numbers = four_bits(weight, scales * factor)
    found = {"weight": packed, "weight_scale": stored, "weight_scale_2": torch.tensor(factor)}
    return found | {"input_scale": torch.tensor(0.5)}, numbers


def modelopt_mxfp4(weight: Matrix) -> tuple[Stored, Matrix]:
    packed, exponents, numbers = mxfp4(weight)
    return {"weight": packed, "weight_scale": exponents}, numbers


@dataclass(frozen=True)
class ModelOptFP8:
    """fp8 of modelopt, with scales of a shape: for a tensor, its outputs, or a block of 128."""

    algorithm: str

    def quantize(self, weight: Matrix) -> tuple[Stored, Matrix]:
        largest = np.abs(weight).max(1, keepdims=self.algorithm != "FP8_PER_CHANNEL_PER_TOKEN")
        scales = (largest / 448).astype(np.float32)
        wide = scales.reshape(-1, 1)
        if self.algorithm != "FP8_PER_CHANNEL_PER_TOKEN":
            assert max(weight.shape) <= 128  # a block
            wide = scales = wide.max().reshape(
                (1, 1, 1, 1) if self.algorithm == "fp8_pb_wo" else ()
            )
        codes = nearest(weight / wide.reshape(-1, 1), E4M3)
        stored = torch.from_numpy(codes).view(torch.float8_e4m3fn)
        return {"weight": stored, "weight_scale": tensor(scales)}, E4M3[codes] * wide.reshape(-1, 1)

    @property
    def format(self) -> Format:
        return Format(modelopt(self.algorithm), self.quantize, keeps_codes=False)


def modelopt(algorithm: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"], **more}


@dataclass(frozen=True)
class Blocks:
    """4 bits of bitsandbytes. Blocks of 64 weights go from one row to the next."""

    kind: str
    is_nested: bool

    def quantize(self, weight: Matrix) -> tuple[Stored, Matrix]:
        table = np.array(NF4 if self.kind == "nf4" else FP4, np.float32)
        blocks = weight.reshape(-1, BLOCK)
        scales = np.abs(blocks).max(1)
        state = {"quant_type": self.kind, "blocksize": BLOCK, "dtype": "float16"}
        stored, more, scales = self._nested(scales) if self.is_nested else ({}, {}, scales)
        codes = nearest(blocks / scales[:, None], table)
        numbers = (table[codes] * scales[:, None]).reshape(weight.shape)
        codes = codes.reshape(-1, 2)
        text = json.dumps(state | {"shape": weight.shape} | more)
        found = {"weight": tensor((codes[:, 0] << 4 | codes[:, 1])[:, None])}
        found |= {"weight.quant_map": tensor(table), "weight.absmax": tensor(scales)} | stored
        name = f"weight.quant_state.bitsandbytes__{self.kind}"
        return found | {name: torch.tensor(list(text.encode()), dtype=torch.uint8)}, numbers

    def _nested(self, scales: Matrix) -> tuple[Stored, dict[str, Any], Matrix]:
        """Return what is stored of quantised scales, their settings, and their numbers."""
        table = np.linspace(-1, 1, 256, dtype=np.float32) ** 3
        offset = np.float32(scales.mean())
        block_of = np.arange(len(scales)) // NESTED_BLOCK
        wide = [
            np.abs(scales[block_of == block] - offset).max() for block in range(block_of[-1] + 1)
        ]
        nested = np.array(wide, np.float32)
        codes = nearest((scales - offset) / nested[block_of], table)
        stored = {"weight.absmax": tensor(codes), "weight.nested_absmax": tensor(nested)}
        stored["weight.nested_quant_map"] = tensor(table)
        more = {"nested_blocksize": NESTED_BLOCK, "nested_dtype": "float32"}
        numbers = table[codes] * nested[block_of] + offset
        return stored, more | {"nested_offset": float(offset)}, numbers

    @property
    def format(self) -> Format:
        settings = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False}
        settings |= {"bnb_4bit_quant_type": self.kind, "llm_int8_skip_modules": ["lm_head"]}
        settings["bnb_4bit_use_double_quant"] = self.is_nested
        return Format(settings, self.quantize, keeps_codes=False, error=0.9)


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    config = {"_type": kind, "_version": 2, "_data": data}
    return {"quant_method": "torchao", "quant_type": {"default": config}}


def torchao_int4(weight: Matrix) -> tuple[Stored, Matrix]:
    """Codes from -8 to 7, which stand for code * scale + zero."""
    groups = grouped(weight, 32)
    low, high = groups.min(-1), groups.max(-1)
    scales = torch.from_numpy((high - low) / 15).bfloat16().float().numpy()
    zeros = torch.from_numpy(low + 8 * scales).bfloat16().float().numpy()
    codes = np.clip(np.round((groups - zeros[..., None]) / scales[..., None]), -8, 7)
    numbers = codes.astype(np.float32) * scales[..., None] + zeros[..., None]
    packed = in_pairs((codes.astype(np.int8) & 15).astype(np.uint8).reshape(weight.shape))
    stored = {"_weight_qdata": packed.view(torch.int8)}
    stored["_weight_scale"] = tensor(scales.T, torch.bfloat16)
    stored["_weight_zero_point"] = tensor(zeros.T, torch.bfloat16)
    return stored, numbers.reshape(weight.shape)


def torchao_intx(weight: Matrix) -> tuple[Stored, Matrix]:
    """Codes from -8 to 7 in a byte each, which stand for (code - zero) * scale."""
    groups = grouped(weight, 32)
    low, high = groups.min(-1), groups.max(-1)
    scales = ((high - low) / 15).astype(np.float32)
    zeros = np.clip(-8 - np.round(low / scales), -8, 7)
    codes = np.clip(np.round(groups / scales[..., None]) + zeros[..., None], -8, 7)
    numbers = (codes - zeros[..., None]).astype(np.float32) * scales[..., None]
    stored = {"_weight_qdata": tensor(codes.reshape(weight.shape), torch.int8)}
    stored |= {"_weight_scale": tensor(scales), "_weight_zero_point": tensor(zeros, torch.int8)}
    return stored, numbers.reshape(weight.shape)


def torchao_fp8(weight: Matrix) -> tuple[Stored, Matrix]:
    scales = (np.abs(weight).max(1, keepdims=True) / 448).astype(np.float32)
    codes = nearest(weight / scales, E4M3)
    stored = torch.from_numpy(codes).view(torch.float8_e4m3fn)
    return {"_weight_qdata": stored, "_weight_scale": tensor(scales)}, E4M3[codes] * scales


def micro(form: str, bits: int, size: int, strategy: str = "group") -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "float", "strategy": strategy, "group_size": size}
    return compressed(form, **weights, symmetric=True, dynamic=False)


FOUR = {"error": 0.9}
FLOAT_FORMATS: dict[str, Format] = {
    "nvfp4": Format(
        micro("nvfp4-pack-quantized", 4, 16, "tensor_group"), packed_nvfp4, False, **FOUR
    ),
    "mxfp4": Format(micro("mxfp4-pack-quantized", 4, 32), packed_mxfp4, **FOUR),
    "mxfp8": Format(micro("mxfp8-quantized", 8, 32), mxfp8, keeps_codes=False),
    "modelopt nvfp4": Format(modelopt("NVFP4", group_size=16), modelopt_nvfp4, False, **FOUR),
    "modelopt mxfp4": Format(modelopt("mxfp4"), modelopt_mxfp4, **FOUR),
    "modelopt mxfp8": Format(modelopt("MXFP8"), mxfp8, keeps_codes=False),
    "modelopt fp8": ModelOptFP8("FP8").format,
    "modelopt fp8 outputs": ModelOptFP8("FP8_PER_CHANNEL_PER_TOKEN").format,
    "modelopt fp8 block": ModelOptFP8("fp8_pb_wo").format,
    "nf4": Blocks("nf4", is_nested=False).format,
    "nf4 nested": Blocks("nf4", is_nested=True).format,
    "fp4": Blocks("fp4", is_nested=False).format,
    "torchao int4": Format(torchao("Int4WeightOnlyConfig"), torchao_int4, keeps_codes=False),
    "torchao intx": Format(torchao("IntxWeightOnlyConfig"), torchao_intx, False, **FOUR),
    "torchao fp8": Format(torchao("Float8WeightOnlyConfig"), torchao_fp8, keeps_codes=False),
}
