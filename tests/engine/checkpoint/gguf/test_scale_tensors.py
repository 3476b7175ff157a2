"""NVFP4 in GGUF files: scales that are tensors of their own multiply the weights."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from engine.checkpoint.gguf.header import read_header
from engine.checkpoint.gguf.scale_tensors import with_scales
from engine.checkpoint.gguf.shapes import split_parts
from engine.checkpoint.gguf.tensors import decode
from engine.errors import ConfigError

NVFP4 = gguf.GGMLQuantizationType.NVFP4
UP, EXPERTS = "blk.0.ffn_up", "blk.0.ffn_up_exps"


def write(path: Path, module: str, shape: tuple[int, ...], **others: np.ndarray) -> np.ndarray:
    """Write a weight in NVFP4 and other tensors of its module. Return its numbers."""
    packed = np.random.default_rng(3).integers(
        32, 64, (*shape[:-1], shape[-1] // 64 * 36), dtype=np.uint8
    )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor(f"{module}.weight", packed, raw_dtype=NVFP4)
    for ending, tensor in others.items():
        writer.add_tensor(f"{module}.{ending}", tensor)
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    return gguf.quants.dequantize(packed, NVFP4)


def test_scale_of_a_weight_multiplies_its_numbers(tmp_path: Path) -> None:
    scale = np.array([0.37], np.float32)
    plain = write(tmp_path / "a.gguf", UP, (4, 128), scale=scale, input_scale=scale * 9)
    tensors = with_scales(read_header(tmp_path / "a.gguf").tensors)
    assert list(tensors) == [f"{UP}.weight"]
    found = decode(tensors[f"{UP}.weight"])
    assert torch.equal(found, torch.from_numpy(plain * scale))


def test_each_expert_has_its_own_scale(tmp_path: Path) -> None:
    scales = np.array([0.5, 3.0], np.float32)
    plain = write(tmp_path / "a.gguf", EXPERTS, (2, 4, 64), scale=scales)
    weight = with_scales(read_header(tmp_path / "a.gguf").tensors)[f"{EXPERTS}.weight"]
    for expert, part in enumerate(split_parts(weight)):
        assert torch.equal(decode(part), torch.from_numpy(plain[expert] * scales[expert]))


@pytest.mark.parametrize("module", [UP, EXPERTS])
def test_wrong_scales_are_refused(module: str, tmp_path: Path) -> None:
    shape = (3, 4, 64) if module == EXPERTS else (4, 64)
    write(tmp_path / "a.gguf", module, shape, scale=np.ones(2, np.float32))
    with pytest.raises(ConfigError, match=rf"{module}.scale in .* has 2 numbers"):
        with_scales(read_header(tmp_path / "a.gguf").tensors)
    write(tmp_path / "a.gguf", module, shape, scale=np.ones(1, np.float16))
    with pytest.raises(ConfigError, match="has the type F16; served is F32"):
        with_scales(read_header(tmp_path / "a.gguf").tensors)


def test_scales_of_other_types_stay_tensors(tmp_path: Path) -> None:
    """Gemma 4 has tensors of such names."""
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor(f"{UP}.weight", np.ones((2, 32), np.float32))
    writer.add_tensor(f"{UP}.scale", np.ones(1, np.float32))
    for step in ("header", "kv_data", "tensors"):
        getattr(writer, f"write_{step}_to_file")()
    writer.close()
    assert set(with_scales(read_header(tmp_path / "a.gguf").tensors)) == {
        f"{UP}.weight",
        f"{UP}.scale",
    }
