"""Tensors of GGUF files in other shapes and types: read right, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.checkpoint.gguf.folder import folder_of
from engine.checkpoint.gguf.tensors import read_tensors
from engine.errors import ConfigError
from tests.engine.checkpoint.gguf.test_models import CASES as MODELS
from tests.support import tiny_gemma4
from tests.support.changed_gguf import Change, GGUFFile
from tests.support.gguf_files import DELTAS, write_gguf
from tests.support.golden import of_transformers
from tests.support.tiny_gguf import ARCHITECTURES, write_tiny

pytestmark = pytest.mark.usefixtures("one_thread", "own_cache")


def delta_file(name: str) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        of_transformers(MODELS[name][1](), folder / "checkpoint")
        return write_gguf(folder / "model.gguf", folder / "checkpoint", MODELS[name][0])

    return write


def tiny_file(architecture: str, changes: Any = None, tensors: Any = None) -> Any:
    return lambda folder: write_tiny(folder / "model.gguf", architecture, changes, tensors=tensors)


FILES: dict[str, Callable[[Path], Path]] = {
    **{name: tiny_file(name) for name in ARCHITECTURES},
    "gemma4 shared": tiny_file("gemma4", *tiny_gemma4.shared()),
    "gemma4 experts": tiny_file("gemma4", *tiny_gemma4.experts()),
    **{name: delta_file(name) for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")},
}
assert {MODELS[name][0] for name in ("qwen3_next", "qwen3_5", "qwen3_5_moe")} == set(DELTAS)


def numbers_of(file: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a file in fp32, and its config."""
    return {name: tensor.read().float() for name, tensor in read_tensors([file]).items()}


def config_of(file: Path) -> str:
    return (folder_of(file) / "config.json").read_text()


def check(change: Change, original: GGUFFile, folder: Path) -> None:
    """Check that the changed file is read like its equal, or refused by name."""
    file = original.write(folder / "changed.gguf", change.name, change.stored, change.kind)
    if change.same is None or (change.name == "rope_freqs.weight" and change.kind != "F32"):
        with pytest.raises(ConfigError) as refusal:
            folder_of(file)
        assert change.name in str(refusal.value)
        if change.kind == "F32":
            expected = original.tensors[change.name].shape
            assert str(list(change.stored.shape)) in str(refusal.value)
            known = [size for size in expected if size != 1]
            assert str(known)[1:-1] in str(refusal.value)
        return
    same = original.write(folder / "same.gguf", change.name, change.same)
    assert config_of(file) == config_of(same)
    found, due = numbers_of(file), numbers_of(same)
    assert found.keys() == due.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, due[name]), name


def check_all(name: str, folder: Path, *, every: int = 1) -> None:
    original = GGUFFile(FILES[name](folder))
    changes = list(original.changes())
    assert len(changes) > 50
    for done, change in changes[::every]:
        try:
            check(change, original, folder)
        except Exception as error:
            raise AssertionError(f"{change.name} {done}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("name", FILES)
def test_other_shapes_and_types_are_read_right_or_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    check_all(name, tmp_path)


@pytest.mark.parametrize("name", ["llama", "stablelm", "gemma4 experts"])
def test_some_other_shapes_and_types_are_read_right_or_refused_by_name(
    name: str, tmp_path: Path
) -> None:
    check_all(name, tmp_path, every=5)


def test_vector_of_heads_may_have_further_dimensions(tmp_path: Path) -> None:
    """The decays of a gated delta net are reordered by heads."""
    original = GGUFFile(FILES["qwen3_5"](tmp_path))
    plain = original.tensors["blk.1.ssm_a"]
    assert plain.shape == (6,)
    for shape in ((1, 6), (6, 1), (1, 1, 6)):
        check(Change("blk.1.ssm_a", plain.reshape(shape), "F32", plain), original, tmp_path)


def test_matrix_of_another_shape_is_refused_with_both(tmp_path: Path) -> None:
    original = GGUFFile(FILES["llama"](tmp_path))
    stored = np.zeros((48, 32), np.float32)
    file = original.write(tmp_path / "changed.gguf", "blk.0.ffn_up.weight", stored)
    with pytest.raises(ConfigError, match=r"blk\.0\.ffn_up\.weight in .* \[48, 32\].* \[64, 32\]"):
        folder_of(file)
