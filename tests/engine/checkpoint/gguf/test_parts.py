"""Which GGUF file of a folder is the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.checkpoint.folder import only_gguf
from engine.checkpoint.gguf.parts import is_sidecar
from engine.errors import ConfigError

SIDECARS = [
    "mmproj-model-f16.gguf",
    "model-mmproj-F16.gguf",
    "Qwen3-8B.mmproj.gguf",
    "mtp-Qwen3-8B-Q8_0.gguf",
    "mtp-Qwen3-8B-Q8_0-00001-of-00002.gguf",
    "eagle3-Qwen3-8B.gguf",
    "imatrix.gguf",
    "Qwen3-8B.imatrix.gguf",
    "Qwen3-8B-LoRA.gguf",
    "ggml-vocab.gguf",
]
MODELS = ["Qwen3-8B-Q4_K_M.gguf", "smtp-7B-Q8_0.gguf", "GLM-MTP-Q8_0.gguf", "Explorable.gguf"]


@pytest.mark.parametrize("name", SIDECARS)
def test_model_is_found_in_a_folder_with_a_sidecar(name: str, tmp_path: Path) -> None:
    assert is_sidecar(Path(name))
    for file in (name, MODELS[0]):
        (tmp_path / file).touch()
    assert only_gguf(tmp_path) == tmp_path / MODELS[0]


@pytest.mark.parametrize("name", MODELS)
def test_model_is_no_sidecar(name: str) -> None:
    assert not is_sidecar(Path(name))


def test_several_models_are_named_without_sidecars(tmp_path: Path) -> None:
    for file in ("mmproj-a.gguf", "a.gguf", "b.gguf"):
        (tmp_path / file).touch()
    with pytest.raises(ConfigError, match=r"choose one with --gguf-file: a.gguf, b.gguf"):
        only_gguf(tmp_path)


def test_sidecar_alone_is_given_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mmproj-a.gguf").touch()
    assert only_gguf(tmp_path) == tmp_path / "mmproj-a.gguf"
