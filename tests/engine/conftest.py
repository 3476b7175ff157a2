"""Fixtures: a tiny checkpoint with random weights, and folders of tensors for merging."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.engine.offline.merge.merging import FILE, Make, Tensors
from tests.support.driver import tiny_llama


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("checkpoints") / "tiny-llama")


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A function that writes a model folder with the given tensors and returns its path."""

    def make(name: str, tensors: Tensors, **config: Any) -> str:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"architectures": ["Toy"]} | config))
        save_file(tensors, folder / FILE)
        return str(folder)

    return make
