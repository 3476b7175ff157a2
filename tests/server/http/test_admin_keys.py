"""Keys of --admin-key-file, and the default of --ui."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.config import EngineConfig
from server.app import create_app
from server.config import ServerConfig
from server.http.api_keys import ApiKeys
from tests.support.fake_engine import FakeEngine


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    (tmp_path / "users").write_text("plain\n")
    (tmp_path / "admins").write_text("# ours\nmighty\n")
    config = ServerConfig(
        api_key_file=str(tmp_path / "users"), admin_key_file=str(tmp_path / "admins")
    )
    return ApiKeys(config)


def test_admin_key_is_an_api_key_of_an_admin(keys: ApiKeys) -> None:
    assert keys.is_admin(keys.find(b"mighty"))
    assert keys.find(b"plain") is not None
    assert not keys.is_admin(keys.find(b"plain"))
    assert not keys.is_admin(keys.find(b"unknown"))


def test_without_keys_everyone_is_admin() -> None:
    assert ApiKeys(ServerConfig()).is_admin(None)


def test_reload_rereads_admin_keys(keys: ApiKeys, tmp_path: Path) -> None:
    (tmp_path / "admins").write_text("plain\n")
    keys.reload()
    assert keys.find(b"mighty") is None
    assert keys.is_admin(keys.find(b"plain"))


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ServerConfig(), True),
        (ServerConfig(ui=False), False),
        (ServerConfig(host="0.0.0.0", api_key=("k",)), False),
        (ServerConfig(host="0.0.0.0", api_key=("k",), ui=True), True),
    ],
)
def test_ui_is_on_by_default_on_loopback_only(
    config: ServerConfig, expected: bool, model: Path
) -> None:
    app = create_app(config, EngineConfig(model=str(model)), FakeEngine([]))
    assert app.state.penstock.serves_ui == expected
