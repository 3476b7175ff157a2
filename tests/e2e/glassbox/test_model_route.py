"""GET /ui/api/model of real servers: the structure, its process, and who may see the settings."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.support import web
from tests.support.process import eventually
from tests.support.serve import Server, serving, starting

UI = {"x-penstock-ui": "1"}
PATH = "/ui/api/model"


def asked(server: Server, **headers: str) -> dict[str, Any]:
    response = web.get(f"{server.base_url}{PATH}", headers={**UI, **headers}, timeout=60)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def readers(server: Server) -> list[psutil.Process]:
    children = psutil.Process(server.process.pid).children()
    return [child for child in children if "engine.offline.structure_command" in child.cmdline()]


@pytest.mark.slow
def test_model_route_is_found_once_and_without_the_engine() -> None:
    with serving("demo", "--block-size", "32") as server:
        first = asked(server)
        begin = time.monotonic()
        assert asked(server) == first
        assert time.monotonic() - begin < 1, "the structure is kept"
        assert readers(server) == []
    repeats = {box["name"]: len(box["layers"]) for box in first["boxes"] if box["layers"]}
    assert repeats == {"blocks.0": 4}
    total = sum(
        box["parameters"] * (4 if box["name"].startswith("blocks.0") else 1)
        for box in first["boxes"]
    )
    assert total == first["parameters"]
    assert {"flag": "--block-size", "value": "32", "default": "64"} in first["settings"]


@pytest.mark.slow
def test_model_route_shows_settings_to_admins_only_and_hides_secrets(tmp_path: Path) -> None:
    admins = tmp_path / "admins"
    admins.write_text("chief\n")
    arguments = ("demo", "--ui", "--api-key", "plain", "--admin-key-file", admins)
    with serving(*arguments) as server:
        assert asked(server, authorization="Bearer plain")["settings"] is None
        found = asked(server, authorization="Bearer chief")
        settings = {setting["flag"]: setting["value"] for setting in found["settings"]}
        assert settings["--api-key"] == "***"
        assert "plain" not in str(found)


@pytest.mark.slow
def test_model_route_process_ends_with_its_server() -> None:
    with starting("demo") as server:
        server.wait_ready()
        with pytest.raises(httpx2.TimeoutException):
            web.get(f"{server.base_url}{PATH}", headers=UI, timeout=0.5)
        eventually(lambda: not readers(server), "the process of a client that left is killed")
        assert os.path.exists(f"/proc/{server.process.pid}")
