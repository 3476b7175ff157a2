"""`penstock quantize` refuses what it cannot round with a message, and leaves no files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import ConfigError
from engine.offline.quantize.command import quantize_folder
from tests.support.driver import tiny_llama
from tests.support.golden import Tensors, edit_checkpoint, of_transformers

pytestmark = pytest.mark.usefixtures("one_thread")
LAYER = "model.layers.0.mlp.up_proj.weight"
SIZES = {"num_hidden_layers": 1, "vocab_size": 40, "hidden_size": 32, "intermediate_size": 64}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "source", **SIZES)


def refusal(source: Path, out: Path, kind: str = "int8") -> str:
    before = sorted(out.parent.iterdir())
    with pytest.raises(ConfigError) as caught:
        quantize_folder(str(source), out, kind)
    assert sorted(out.parent.iterdir()) == before
    return str(caught.value)


def set_weight(folder: Path, value: torch.Tensor | float) -> None:
    def change(config: dict[str, Any], tensors: Tensors) -> None:
        if isinstance(value, torch.Tensor):
            tensors[LAYER] = value
        else:
            tensors[LAYER][3, 5] = value

    edit_checkpoint(folder, change)


def test_unknown_form_is_refused(source: Path, tmp_path: Path) -> None:
    said = refusal(source, tmp_path / "out", "int3")
    assert said == "--quantization: 'int3' is not one of int8, int4, fp8."


def test_folder_with_files_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    assert "is not an empty folder; give a new one" in refusal(source, source)
    (tmp_path / "empty").mkdir()
    quantize_folder(str(source), tmp_path / "empty", "int8")
    assert (tmp_path / "empty" / "config.json").is_file()


def test_quantized_checkpoint_is_refused(source: Path, tmp_path: Path) -> None:
    quantize_folder(str(source), tmp_path / "out", "int8")
    said = refusal(tmp_path / "out", tmp_path / "again")
    assert "quantization_config in config.json: quantised checkpoints cannot be" in said


def test_gguf_file_is_refused(source: Path, tmp_path: Path) -> None:
    (source / "model.safetensors").unlink()
    (source / "model.gguf").write_bytes(b"GGUF")
    assert "is a GGUF file, which cannot be" in refusal(source, tmp_path / "out")


def test_conv1d_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config

    sizes = {"n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 40, "n_positions": 16}
    of_transformers(GPT2Config(**sizes), tmp_path / "gpt2")
    assert "is a Conv1D, as of GPT-2" in refusal(tmp_path / "gpt2", tmp_path / "out")


@pytest.mark.parametrize(
    ("value", "kind", "said"),
    [
        (float("nan"), "int8", f"{LAYER} in .* holds NaN or infinity"),
        (float("-inf"), "fp8", f"{LAYER} in .* holds NaN or infinity"),
        (1e7, "int4", r"holds numbers up to 1e\+07, whose scale is too large for F16"),
        (torch.ones(64, 16), "int8", r"has shape \[64, 16\]; the layer .* ask for \[64, 32\]"),
        (torch.ones(64, 32).double(), "int8", "has dtype F64; supported: F16, BF16, F32"),
    ],
)
def test_weights_that_cannot_be_rounded_are_named(
    value: Any, kind: str, said: str, source: Path, tmp_path: Path
) -> None:
    set_weight(source, value)
    assert re.search(said, refusal(source, tmp_path / "out", kind))


def test_missing_tensor_is_named(source: Path, tmp_path: Path) -> None:
    edit_checkpoint(source, lambda config, tensors: tensors.pop(LAYER))
    assert f"lack {LAYER}" in refusal(source, tmp_path / "out")


def test_model_without_a_layer_that_fills_groups_is_refused(tmp_path: Path) -> None:
    source = tiny_llama(tmp_path / "source", **SIZES | {"hidden_size": 40, "intermediate_size": 48})
    assert "has no linear layer that can be rounded" in refusal(source, tmp_path / "out", "int4")
    assert len(quantize_folder(str(source), tmp_path / "out", "fp8").rounded) == 7


def test_interrupted_folder_is_never_a_model(source: Path, tmp_path: Path) -> None:
    """config.json comes last: after a SIGKILL the unfinished folder is no model."""
    shares = []

    def stop(share: float) -> None:
        shares.append(share)
        [staging] = tmp_path.glob(".out-*")
        assert not (staging / "config.json").exists()
        if share == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantize_folder(str(source), tmp_path / "out", "int8", stop)
    assert shares == sorted(shares)
    assert sorted(tmp_path.iterdir()) == [source]
