"""Keys of --admin-key-file, and the default of --ui."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from server.config import ServerConfig
from server.http.addresses import serves_ui
from server.http.api_keys import ApiKeys
from server.http.key_file import read_limited_keys


@pytest.fixture
def keys(tmp_path: Path) -> ApiKeys:
    (tmp_path / "users").write_text("plain\n")
    (tmp_path / "admins").write_text("# ours\nmighty\n")
    config = ServerConfig(
        api_key_file=str(tmp_path / "users"), admin_key_file=str(tmp_path / "admins")
    )
    return ApiKeys(partial(read_limited_keys, config))


def test_admin_key_is_an_api_key_of_an_admin(keys: ApiKeys) -> None:
    assert keys.is_admin(keys.find(b"mighty"))
    assert keys.find(b"plain") is not None
    assert not keys.is_admin(keys.find(b"plain"))
    assert not keys.is_admin(keys.find(b"unknown"))


def test_without_keys_everyone_is_admin() -> None:
    assert ApiKeys(list).is_admin(None)


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
def test_ui_is_on_by_default_on_loopback_only(config: ServerConfig, expected: bool) -> None:
    assert serves_ui(config) == expected
