"""Experts in a tensor for all of a layer: written one by one, or named as those that stay plain."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoint.tensors import checkpoint_tensors
from engine.errors import ConfigError
from engine.offline.quantize.command import _quantize_as_given, quantize_folder
from engine.offline.quantize.forms import FORMS
from tests.engine.models.test_granite_moe import config as granite
from tests.engine.models.test_qwen3_5_moe import as_published
from tests.engine.models.test_qwen3_5_moe import config as qwen
from tests.support.forward import forward, whole
from tests.support.golden import TOLERANCE, edit_checkpoint, load, of_transformers

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPT = [(7 * index + 3) % 211 for index in range(40)]
SIZES = {"vocab_size": 211, "hidden_size": 64}
Tensors = dict[str, torch.Tensor]


def gemma(**more: Any) -> Any:
    from tests.engine.models.test_gemma4 import EXPERTS, config

    return config(**SIZES, **(EXPERTS | {"moe_intermediate_size": 32} | more))


def one_by_one(config: dict[str, Any], tensors: Tensors) -> None:
    """Put each matrix of an expert into a tensor of its own."""
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "down_proj"))]:
        if ".experts." not in name:
            continue
        base, _, kind = name.rpartition(".")
        for e, matrix in enumerate(tensors.pop(name)):
            parts = matrix.chunk(2) if kind == "gate_up_proj" else [matrix]
            kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
            for part, values in zip(kinds, parts, strict=True):
                tensors[f"{base}.{e}.{part}.weight"] = values.clone()


def logits_of(folder: Path) -> torch.Tensor:
    return forward(load(folder), [PROMPT], whole([PROMPT]))[0]


def as_read(source: Path) -> Callable[[dict[str, Any], Tensors], None]:
    """Return an edit that gives a checkpoint the numbers of a quantised one."""
    numbers = {name: tensor.read() for name, tensor in checkpoint_tensors(source).items()}

    def edit(config: dict[str, Any], tensors: Tensors) -> None:
        assert tensors.keys() == numbers.keys()
        tensors |= {name: each.float().contiguous() for name, each in numbers.items()}

    return edit


@pytest.mark.parametrize("kind", FORMS)
def test_fused_experts_are_rounded_as_single_ones(kind: str, tmp_path: Path) -> None:
    of_transformers(gemma(), tmp_path / "fused")
    of_transformers(gemma(), tmp_path / "single")
    edit_checkpoint(tmp_path / "single", one_by_one)
    found = quantize_folder(str(tmp_path / "fused"), tmp_path / "out", kind)
    due = quantize_folder(str(tmp_path / "single"), tmp_path / "due", kind)
    assert not found.fused
    assert found.rounded == due.rounded
    assert sum(".experts." in name for name in found.rounded) == 4 * 4 * 3
    tensors, others = (load_file(tmp_path / x / "model.safetensors") for x in ("out", "due"))
    assert tensors.keys() == others.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor.view(torch.uint8), others[name].view(torch.uint8)), name
    edit_checkpoint(tmp_path / "single", as_read(tmp_path / "out"))
    torch.testing.assert_close(
        logits_of(tmp_path / "out"), logits_of(tmp_path / "single"), **TOLERANCE
    )


@pytest.mark.slow
def test_fused_experts_of_a_multimodal_model_are_rounded(tmp_path: Path) -> None:
    of_transformers(qwen(**SIZES), tmp_path / "single")
    of_transformers(qwen(**SIZES), tmp_path / "fused")
    edit_checkpoint(tmp_path / "fused", as_published)
    found = quantize_folder(str(tmp_path / "fused"), tmp_path / "out", "int8")
    quantize_folder(str(tmp_path / "single"), tmp_path / "due", "int8")
    assert not found.fused
    prefix = "model.language_model.layers.1.mlp.experts."
    assert f"{prefix}5.gate_proj.weight" in found.rounded
    torch.testing.assert_close(
        logits_of(tmp_path / "out"), logits_of(tmp_path / "due"), **TOLERANCE
    )


def test_single_experts_that_do_not_fill_groups_are_named(tmp_path: Path) -> None:
    of_transformers(gemma(moe_intermediate_size=24), tmp_path / "fused")
    found = quantize_folder(str(tmp_path / "fused"), tmp_path / "out", "int8")
    assert "model.layers.3.experts.2.up_proj.weight" in found.rounded
    assert "model.layers.3.experts.2.down_proj" in found.ignored
    load(tmp_path / "out")


def test_experts_without_a_form_are_named_in_the_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    of_transformers(granite(hidden_size=96), tmp_path / "granite")
    folders = [str(tmp_path / "granite"), str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", ["quantize", *folders, "int8"])
    lines = _quantize_as_given(lambda share: None)
    [line] = [line for line in lines if line.startswith("experts that stay plain")]
    assert "because one tensor holds those of a layer" in line
    assert "model.layers.0.block_sparse_moe.input_linear.weight" in line
    load(tmp_path / "out")


def test_fused_experts_of_another_shape_are_refused(tmp_path: Path) -> None:
    def swap(config: dict[str, Any], tensors: Tensors) -> None:
        name = "model.layers.0.experts.down_proj"
        tensors[name] = tensors[name].mT.contiguous()

    of_transformers(gemma(), tmp_path / "fused")
    edit_checkpoint(tmp_path / "fused", swap)
    with pytest.raises(ConfigError, match=r"experts\.down_proj in .* has shape \[4, 32, 64\]"):
        quantize_folder(str(tmp_path / "fused"), tmp_path / "out", "int8")
