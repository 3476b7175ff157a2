"""AppState: the limits of the loaded model."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from engine.config import EngineConfig
from server.app import create_app
from server.config import ServerConfig
from tests.support.fake_engine import INFO, FakeEngine

POSITIONS = INFO.max_model_len


@pytest.mark.parametrize(
    ("kind", "text_limit", "longest"),
    [
        ("encoder", None, POSITIONS),
        ("encoder", 5, 5),
        ("encoder", POSITIONS + 1, POSITIONS),
        ("decoder", 5, POSITIONS),
    ],
)
def test_max_length_is_that_of_a_text_only_for_an_encoder(
    kind: Literal["encoder", "decoder"], text_limit: int | None, longest: int, model: Path
) -> None:
    engine = FakeEngine(lambda request: [])
    engine.info = msgspec.structs.replace(INFO, kind=kind)
    app = create_app(ServerConfig(), EngineConfig(model=str(model)), engine)
    state = dataclasses.replace(app.state.penstock, text_limit=text_limit)
    assert state.max_length() == longest
