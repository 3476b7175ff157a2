"""Clients that the pages' data are for: admins, clients of this machine, and no one by a proxy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from server.app import create_app
from server.cli.banner import banner
from server.config import ServerConfig
from tests.server.http.test_auth import PROXIED
from tests.support.fake_engine import INFO, FakeEngine
from tests.support.rig import serving

PAGE = {"x-penstock-ui": "1"}


@pytest.mark.parametrize("header", PROXIED)
async def test_pages_of_a_server_without_keys_refuse_a_proxied_client(
    model: Path, says: Any, header: dict[str, str]
) -> None:
    async with serving(FakeEngine(says("x")), model) as served:
        assert (await served.http.get("/ui/api/hello", headers=PAGE)).status_code == 200
        refused = await served.http.get("/ui/api/hello", headers=PAGE | header)
        assert refused.status_code == 403
        assert "no API key" in refused.json()["error"]["message"]


async def test_pages_serve_a_proxied_client_with_an_admin_key(
    model: Path, says: Any, tmp_path: Path
) -> None:
    (tmp_path / "admins").write_text("mighty\n")
    config = {"admin_key_file": str(tmp_path / "admins")}
    async with serving(FakeEngine(says("x")), model, "mighty", **config) as served:
        headers = {**PAGE, "x-forwarded-for": "192.0.2.1"}
        hello = await served.http.get("/ui/api/hello", headers=headers)
        assert hello.json()["role"] == "admin"


def test_pages_on_the_network_without_a_key_are_refused(model: Path) -> None:
    config = ServerConfig(host="0.0.0.0", ui=True)
    with pytest.raises(ConfigError, match="--api-key-file"):
        create_app(config, EngineConfig(model=str(model)), FakeEngine([]))


@pytest.mark.parametrize("has_pages", [True, False])
async def test_banner_has_the_link_to_the_pages_where_they_are_served(
    model: Path, says: Any, has_pages: bool
) -> None:
    async with serving(FakeEngine(says("x")), model, ui=has_pages) as served:
        lines = banner(served.app, INFO, 8000).splitlines()
    shown = [line.split()[1] for line in lines if line.startswith("  pages ")]
    assert shown == (["http://127.0.0.1:8000/ui/"] if has_pages else [])
