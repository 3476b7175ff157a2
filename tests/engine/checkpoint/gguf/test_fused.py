"""Files whose converter has put queries, keys and values together, or gates and ups of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.checkpoint.gguf.folder import folder_of
from engine.checkpoint.gguf.tensors import read_tensors
from engine.errors import ConfigError
from tests.support import tiny_gemma4, tiny_granite
from tests.support.changed_gguf import GGUFFile
from tests.support.llama_cpp_cases import biases
from tests.support.tiny_gguf import write_tiny

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")
PARTS = ("attn_q", "attn_k", "attn_v")
GATE, UP, GATE_UP = "ffn_gate_exps", "ffn_up_exps", "ffn_gate_up_exps"


def read(file: Path) -> tuple[str, dict[str, torch.Tensor]]:
    """Return the config of a file, and its numbers."""
    tensors = {name: tensor.read().float() for name, tensor in read_tensors([file]).items()}
    return (folder_of(file) / "config.json").read_text(), tensors


def check_same(file: Path, other: Path) -> None:
    (config, tensors), (due_config, due) = read(file), read(other)
    assert config == due_config
    assert tensors.keys() == due.keys()
    for name, tensor in tensors.items():
        assert torch.equal(tensor, due[name]), name


def fused_qkv(tensors: dict[str, np.ndarray]) -> None:
    for name in [name for name in tensors if ".attn_q." in name]:
        names = [name.replace(PARTS[0], part) for part in PARTS]
        if all(each in tensors for each in names):
            rows = [tensors.pop(each) for each in names]
            tensors[name.replace(PARTS[0], "attn_qkv")] = np.concatenate(rows)


def fused_experts(tensors: dict[str, np.ndarray]) -> None:
    for name in [name for name in tensors if f".{GATE}." in name]:
        both = [tensors.pop(name), tensors.pop(name.replace(GATE, UP))]
        tensors[name.replace(GATE, GATE_UP)] = np.concatenate(both, axis=1)


def experts_apart(tensors: dict[str, np.ndarray]) -> None:
    for name in [name for name in tensors if f".{GATE_UP}." in name]:
        gate, up = np.split(tensors.pop(name), 2, axis=1)
        tensors[name.replace(GATE_UP, GATE)] = gate
        tensors[name.replace(GATE_UP, UP)] = up


@pytest.mark.parametrize(
    ("architecture", "changes", "tensors", "kind"),
    [
        ("llama", {}, biases(*PARTS), "F32"),
        ("qwen2", {}, {}, "Q8_0"),
        ("gemma4", *tiny_gemma4.shared(), "F32"),
        ("lfm2", {}, {}, "F32"),
    ],
    ids=["llama", "qwen2", "gemma4", "lfm2"],
)
def test_queries_keys_and_values_may_be_one_tensor(
    architecture: str, changes: Any, tensors: Any, kind: str, tmp_path: Path
) -> None:
    file = write_tiny(tmp_path / "apart.gguf", architecture, changes, tensors=tensors)
    original = GGUFFile(file)
    name = "blk.1.attn_output.weight"
    apart = original.write(tmp_path / "plain.gguf", name, original.tensors[name], kind)
    fused_qkv(original.tensors)
    assert "blk.1.attn_qkv.weight" in original.tensors
    fused = original.write(tmp_path / "fused.gguf", name, original.tensors[name], kind)
    check_same(fused, apart)


@pytest.mark.parametrize("architecture", ["qwen2moe", "lfm2moe", "deepseek2", "granitehybrid"])
def test_gates_and_ups_of_experts_may_be_one_tensor(architecture: str, tmp_path: Path) -> None:
    changes, tensors = tiny_granite.experts() if architecture == "granitehybrid" else ({}, {})
    file = write_tiny(tmp_path / "apart.gguf", architecture, changes, tensors=tensors)
    original = GGUFFile(file)
    fused_experts(original.tensors)
    name = f"blk.1.{GATE_UP}.weight"
    fused = original.write(tmp_path / "fused.gguf", name, original.tensors[name])
    check_same(fused, file)


def test_gates_and_ups_of_gemma4_may_be_apart(tmp_path: Path) -> None:
    changes, tensors = tiny_gemma4.experts()
    file = write_tiny(tmp_path / "fused.gguf", "gemma4", changes, tensors=tensors)
    original = GGUFFile(file)
    experts_apart(original.tensors)
    name = f"blk.1.{UP}.weight"
    check_same(original.write(tmp_path / "apart.gguf", name, original.tensors[name]), file)


@pytest.mark.parametrize("rows", [63, 65, 32])
def test_fused_tensor_of_another_size_is_refused(rows: int, tmp_path: Path) -> None:
    original = GGUFFile(write_tiny(tmp_path / "apart.gguf", "llama"))
    fused_qkv(original.tensors)
    name = "blk.0.attn_qkv.weight"
    file = original.write(tmp_path / "cut.gguf", name, np.zeros((rows, 32), np.float32))
    with pytest.raises(ConfigError, match=r"blk\.0\.attn_q"):
        folder_of(file)
