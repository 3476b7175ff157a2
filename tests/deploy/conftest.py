from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.installed import Installed, built_wheel


@pytest.fixture(scope="session")
def wheel() -> Path:
    return built_wheel()


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("installed"), wheel)
