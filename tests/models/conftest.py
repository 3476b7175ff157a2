"""The `golden` and `encoder` fixtures: one reference model and checkpoint per case."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.models.encoders import Encoder
from tests.models.golden import Golden
from tests.models.nanochat_files import base_folder


@pytest.fixture(scope="module")
def golden(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> Golden:
    pytest.importorskip("transformers")
    return Golden(request.param, tmp_path_factory.mktemp(request.param.name))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """nanochat's base folder with a model and a tokenizer."""
    return base_folder(tmp_path / "base")


@pytest.fixture(scope="module")
def encoder(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, one_thread: None
) -> Encoder:
    pytest.importorskip("transformers")
    return Encoder(request.param, tmp_path_factory.mktemp(request.param.name))
