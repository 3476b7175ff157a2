"""Weights that libraries of quantisation write, against what they dequantise themselves.

The libraries are not among the dependencies. In an environment that has them:
pip install --no-deps compressed-tensors bitsandbytes torchao nvidia-modelopt loguru omegaconf
pytest -m slow tests/engine/checkpoint/quantized/test_libraries.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.quantized.formats import storage_format
from engine.checkpoint.quantized.tensors import original_tensors
from engine.checkpoint.stored import stored_tensors

pytestmark = pytest.mark.slow
WEIGHT = torch.randn(48, 128, generator=torch.Generator().manual_seed(0))
FORMS = {
    "NVFP4": "nvfp4-pack-quantized",
    "NVFP4A16": "nvfp4-pack-quantized",
    "MXFP4": "mxfp4-pack-quantized",
    "MXFP8": "mxfp8-quantized",
}


def weight_of(folder: Path, parts: dict[str, torch.Tensor], settings: Any) -> torch.Tensor:
    """Return the weight of the layer x with these tensors, as it is served in fp32."""
    file = folder / "model.safetensors"
    save_file({f"x.{name}": part.contiguous() for name, part in parts.items()}, file)
    storage = storage_format({"quantization_config": settings})
    assert storage is not None
    return original_tensors(stored_tensors([file]), storage)["x.weight"].read()


@pytest.mark.parametrize("preset", FORMS)
def test_compressed_tensors(preset: str, tmp_path: Path) -> None:
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme(preset, ["Linear"])
    groups = WEIGHT.unflatten(1, (-1, scheme.weights.group_size))
    parts, more = {"weight": WEIGHT}, {}
    if preset.startswith("NV"):
        more["global_scale"] = generate_gparam(WEIGHT.min(), WEIGHT.max()).reshape(1)
        parts["weight_global_scale"] = more["global_scale"]
    scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights, **more)
    compressor = BaseCompressor.get_value_from_registry(FORMS[preset])
    stored = compressor.compress(parts | {"weight_scale": scales.float()}, scheme)
    due = compressor.decompress(dict(stored), scheme)["weight"]
    group = json.loads(scheme.model_dump_json())
    settings = {"quant_method": "compressed-tensors", "format": FORMS[preset]}
    found = weight_of(tmp_path, stored, settings | {"config_groups": {"group_0": group}})
    assert torch.equal(found.to(due.dtype), due)


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_bitsandbytes(kind: str, is_nested: bool, tmp_path: Path) -> None:
    """With rows of whole blocks: its CPU kernel (0.50.2) misreads rows of 96 weights and others."""
    functional = pytest.importorskip("bitsandbytes.functional")
    codes, state = functional.quantize_4bit(
        WEIGHT, quant_type=kind, blocksize=64, compress_statistics=is_nested
    )
    parts = {f"weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    settings = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    found = weight_of(tmp_path, parts | {"weight": codes}, settings)
    assert torch.equal(found, functional.dequantize_4bit(codes, state))


@pytest.mark.parametrize("kind", ["intx", "int8", "fp8"])
def test_torchao(kind: str, tmp_path: Path) -> None:
    torchao = pytest.importorskip("torchao.quantization")
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from transformers import TorchAoConfig

    config = {
        "intx": lambda: torchao.IntxWeightOnlyConfig(torch.int4, torchao.PerGroup(32)),
        "int8": torchao.Int8WeightOnlyConfig,
        "fp8": torchao.Float8WeightOnlyConfig,
    }[kind]()
    model = torch.nn.Sequential(torch.nn.Linear(128, 48, bias=False))
    torchao.quantize_(model, config)
    parts, _ = flatten_tensor_state_dict({"x.weight": model[0].weight})
    settings = json.loads(json.dumps(TorchAoConfig(config).to_dict(), default=str))
    parts = {name.removeprefix("x."): part for name, part in parts.items()}
    assert torch.equal(weight_of(tmp_path, parts, settings), model[0].weight.dequantize())


def test_torchao_int4(tmp_path: Path) -> None:
    api = pytest.importorskip("torchao.prototype.gptq.api")
    codes = (WEIGHT * 3).round().clamp(-8, 7).to(torch.int8)
    scales, zeros = torch.rand(4, 48).bfloat16(), torch.randn(4, 48).bfloat16()
    parts = {"_weight_qdata": codes[:, ::2] & 15 | codes[:, 1::2] << 4}
    parts |= {"_weight_scale": scales, "_weight_zero_point": zeros}
    config = {"_type": "Int4WeightOnlyConfig", "_data": {"int4_packing_format": "plain"}}
    settings = {"quant_method": "torchao", "quant_type": {"default": config}}
    due = api._int4_row_dequantize_zp(codes, scales.float(), zeros.float(), 32)
    assert torch.equal(weight_of(tmp_path, parts, settings), due)


@pytest.mark.parametrize("algorithm", ["NVFP4", "MXFP4", "MXFP8"])
def test_modelopt(algorithm: str, tmp_path: Path) -> None:
    tensors: Any = pytest.importorskip("modelopt.torch.quantization.qtensor")
    size = 16 if algorithm == "NVFP4" else 32
    more = () if algorithm == "MXFP8" else (size,)
    quantized, *scales = getattr(tensors, f"{algorithm}QTensor").quantize(WEIGHT.clone(), *more)
    parts = {"weight": quantized._quantized_data, "weight_scale": scales[0].reshape(48, -1)}
    given = {"scale": scales[0], "block_sizes": {-1: size}}
    if algorithm == "NVFP4":
        parts["weight_scale_2"] = given["double_scale"] = scales[1]
    settings = {"quant_method": "modelopt", "quant_algo": algorithm}
    found = weight_of(tmp_path, parts, settings)
    assert torch.equal(found, quantized.dequantize(torch.float32, **given))
