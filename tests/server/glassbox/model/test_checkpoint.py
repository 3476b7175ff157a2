"""CheckpointFacts: the formats of the weights on disk."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.checkpoint.quantized.formats import STORAGE_FORMATS
from server.glassbox.model.checkpoint import CheckpointFacts
from tests.support.quantized_files import FORMATS
from tests.support.tiny_gguf import write_tiny

WIDTHS = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "I8": 1, "U8": 1, "I32": 4, "I64": 8}


def write(folder: Path, tensors: dict[str, tuple[str, int]], **settings: Any) -> CheckpointFacts:
    """Write a folder with tensors of a dtype and a count of numbers; return its facts."""
    header, offset = {}, 0
    for name, (dtype, count) in tensors.items():
        end = offset + count * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": [count], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))
    (folder / "config.json").write_text(json.dumps(settings))
    return CheckpointFacts(folder)


def formats(facts: CheckpointFacts, method: str | None = None) -> list[tuple[str, int, int]]:
    parts = STORAGE_FORMATS[method].suffixes() if method else ()
    return [(one["name"], one["tensors"], one["nbytes"]) for one in facts.formats(parts)]


def test_formats_of_plain_weights_are_their_dtypes(tmp_path: Path) -> None:
    facts = write(tmp_path, {"a.weight": ("BF16", 8), "b.weight": ("BF16", 4), "n": ("F32", 2)})
    assert formats(facts) == [("BF16", 2, 24), ("F32", 1, 8)]


@pytest.mark.parametrize(
    ("settings", "parts", "name"),
    [
        (
            {"quant_method": "gptq", "bits": 4},
            {"qweight": "I32", "qzeros": "I32", "scales": "F32", "g_idx": "I32"},
            "GPTQ int4",
        ),
        (
            {"quant_method": "awq", "bits": 4},
            {"qweight": "I32", "qzeros": "I32", "scales": "BF16"},
            "AWQ int4",
        ),
        (
            {"quant_method": "fp8"},
            {"weight": "F8_E4M3", "weight_scale_inv": "F32"},
            "fp8",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"weights": {"num_bits": 4}}},
            },
            {
                "weight_packed": "I32",
                "weight_scale": "BF16",
                "weight_shape": "I64",
                "weight_zero_point": "I32",
                "weight_g_idx": "I32",
            },
            "compressed-tensors int4",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"weights": {"num_bits": 8}}},
            },
            {"weight": "I8", "weight_scale": "BF16"},
            "compressed-tensors int8",
        ),
    ],
)
def test_parts_of_a_quantized_weight_count_as_one_tensor(
    tmp_path: Path, settings: dict[str, Any], parts: dict[str, str], name: str
) -> None:
    layers = ("model.layers.0.q_proj", "model.layers.1.weight_net.q_proj")
    tensors = {f"{layer}.{part}": (dtype, 64) for layer in layers for part, dtype in parts.items()}
    tensors |= {"model.layers.0.q_proj.bias": ("F32", 1), "norm.weight": ("F32", 1)}
    facts = write(tmp_path, tensors, quantization_config=settings)
    size = 2 * 64 * sum(WIDTHS[dtype] for dtype in parts.values())
    assert formats(facts, settings["quant_method"]) == [(name, 2, size), ("F32", 2, 8)]


@pytest.mark.parametrize("method", STORAGE_FORMATS)
def test_endings_of_every_format_are_parts_of_one_weight(method: str, tmp_path: Path) -> None:
    storage = STORAGE_FORMATS[method]
    endings = storage.endings | storage.unused
    tensors = {f"a.up{storage.names.separator}{ending}": ("I8", 8) for ending in endings}
    facts = write(
        tmp_path,
        tensors | {"a.up.bias": ("F32", 1), "a.scale.weight": ("F32", 1)},
        quantization_config={"quant_method": method, "bits": 8},
    )
    [(name, *counts), plain] = formats(facts, method)
    assert name.lower().startswith(storage.kind)
    assert counts == [1, 8 * len(endings)]
    assert plain == ("F32", 2, 8)


@pytest.mark.parametrize("name", FORMATS)
def test_weight_of_every_format_counts_as_one_tensor(name: str, tmp_path: Path) -> None:
    """The codes may have any name: they are the largest tensor without floats."""
    settings = FORMATS[name].settings
    weight = np.random.default_rng(0).normal(size=(48, 96)).astype(np.float32)
    stored, _ = FORMATS[name].quantize(weight)
    tensors = {f"up.{ending}": part.contiguous() for ending, part in stored.items()}
    bias = {"up.bias": torch.zeros(2), "plain.weight": torch.zeros(4)}
    save_file(tensors | bias, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": settings}))
    [(label, *counts), plain] = formats(CheckpointFacts(tmp_path), settings["quant_method"])
    assert label.lower().startswith(STORAGE_FORMATS[settings["quant_method"]].kind)
    assert counts == [1, sum(part.nbytes for part in stored.values())]
    assert plain == ("F32", 2, 24)


def test_plain_layer_among_quantized_ones_keeps_its_dtype(tmp_path: Path) -> None:
    tensors = {"a.weight": ("I8", 64), "a.weight_scale": ("BF16", 8), "b.weight": ("BF16", 4)}
    facts = write(tmp_path, tensors, quantization_config={"quant_method": "compressed-tensors"})
    assert [one[1:] for one in formats(facts, "compressed-tensors")] == [(1, 80), (1, 8)]


def test_experts_in_mxfp4_are_named(tmp_path: Path) -> None:
    experts = "model.layers.0.mlp.experts"
    tensors = {
        f"{experts}.{matrix}_{part}": ("U8", 64)
        for matrix in ("gate_up_proj", "down_proj")
        for part in ("blocks", "scales")
    }
    facts = write(tmp_path, tensors, quantization_config={"quant_method": "mxfp4"})
    assert formats(facts, "mxfp4") == [("mxfp4", 2, 256)]


def test_formats_of_a_gguf_file_are_its_types(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny.gguf")
    (tmp_path / "config.json").write_text("{}")
    [one] = CheckpointFacts(tmp_path).formats(())
    assert one["name"] == "F32"
    assert one["nbytes"] > 0


def test_unreadable_weights_have_no_formats(tmp_path: Path) -> None:
    assert CheckpointFacts(tmp_path).formats(()) == []
    (tmp_path / "model.safetensors").write_bytes(b"short")
    assert CheckpointFacts(tmp_path).formats(()) == []
