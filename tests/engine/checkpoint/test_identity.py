"""A checkpoint's identity: equal for copies, different for other weights or another config.json."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.checkpoint import identity
from engine.checkpoint.folder import model_folder
from engine.checkpoint.identity import checkpoint_identity, weights_identity
from engine.config import EngineConfig
from tests.support.variant import noisy_copy

DEMO = model_folder("demo")


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DEMO, tmp_path / "copied"))


def test_identity_of_a_later_copy_is_the_same(copied: Path) -> None:
    for file in copied.iterdir():
        os.utime(file, (1, 1))
    assert checkpoint_identity(copied) == checkpoint_identity(DEMO)


def flip_last_byte(folder: Path) -> None:
    file = folder / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def change_config(folder: Path) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 0.5}))


@pytest.mark.parametrize("change", [flip_last_byte, change_config])
def test_identity_after_a_change_differs(copied: Path, change: Callable[[Path], None]) -> None:
    change(copied)
    assert checkpoint_identity(copied) != checkpoint_identity(DEMO)


def test_identity_of_a_renamed_file_is_the_same(copied: Path) -> None:
    (copied / "model.safetensors").rename(copied / "first.safetensors")
    index = {"weight_map": {"model.norm.weight": "first.safetensors"}}
    (copied / "model.safetensors.index.json").write_text(json.dumps(index))
    assert checkpoint_identity(copied) == checkpoint_identity(DEMO)


def test_identity_from_a_sample_notices_trained_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a checkpoint of 2 GB: a piece of 16 bytes in each kilobyte is read."""
    monkeypatch.setattr(identity, "PIECE_BYTES", 16)
    monkeypatch.setattr(identity, "SAMPLE_BYTES", 5_800_000 // 64)
    trained = noisy_copy(DEMO, tmp_path / "trained", noise=0.05)
    same_size = (trained / "model.safetensors").stat().st_size
    (tmp_path / "zeros").mkdir()
    shutil.copy(DEMO / "config.json", tmp_path / "zeros")
    (tmp_path / "zeros" / "model.safetensors").write_bytes(bytes(same_size))
    folders = (DEMO, trained, tmp_path / "zeros")
    assert len({checkpoint_identity(folder) for folder in folders}) == len(folders)


def test_weights_identity_names_rounding_without_a_kernel_for_codes() -> None:
    given = (None, "none", "int8", "int4", "fp8")
    found = [weights_identity(EngineConfig(quantization=kind), DEMO) for kind in given]
    assert found[0] == found[1] == checkpoint_identity(DEMO)
    assert len(set(found)) == 4


def test_weights_identity_of_random_weights_reads_no_file(tmp_path: Path) -> None:
    assert weights_identity(EngineConfig(load_format="dummy"), tmp_path) == "dummy"
