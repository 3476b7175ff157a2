"""Fixtures of the APIs: OpenAI's schemas."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.openai_spec import OpenAISpec


@pytest.fixture(scope="session")
def spec(assets: Path) -> OpenAISpec:
    return OpenAISpec(assets / "openai-spec" / "openapi.yaml")
