"""A new room of the engine or the server needs a floor in pyproject.toml."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.structure.measure import ROOT


def floors(top: str) -> dict[str, Any]:
    """Return the contract in pyproject.toml that lists the floors of `engine` or `server`."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    [found] = [each for each in contracts if each.get("containers") == [top]]
    return dict(found)


def lint(folder: Path, top: str, rooms: dict[str, str]) -> str:
    """Write a project with these rooms and their sources; return what breaks its floors, or ""."""
    contract = floors(top)
    for room, source in rooms.items():
        (folder / top / room).mkdir(parents=True)
        (folder / top / room / "__init__.py").write_text(source)
    (folder / top / "__init__.py").write_text("")
    lines = [f"{key} = {value!r}" for key, value in contract.items() if key != "exhaustive"]
    config = f'[tool.importlinter]\nroot_package = "{top}"\n[[tool.importlinter.contracts]]\n'
    config += "\n".join([*lines, f"exhaustive = {str(contract['exhaustive']).lower()}\n"])
    (folder / "pyproject.toml").write_text(config)
    command = [Path(sys.executable).with_name("lint-imports"), "--no-cache"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == ("1 kept, 0 broken" in done.stdout), done.stdout + done.stderr
    return "" if done.returncode == 0 else done.stdout


def rooms_of(top: str) -> dict[str, str]:
    layers = floors(top)["layers"]
    return {room.strip("()"): "" for layer in layers for room in layer.split(" | ")}


@pytest.mark.parametrize("top", ["engine", "server"])
def test_rooms_with_floors_pass(top: str, tmp_path: Path) -> None:
    assert lint(tmp_path, top, rooms_of(top)) == ""


@pytest.mark.parametrize("top", ["engine", "server"])
def test_new_room_without_a_floor_fails(top: str, tmp_path: Path) -> None:
    assert f"{top}.new_room" in lint(tmp_path, top, {**rooms_of(top), "new_room": ""})


@pytest.mark.parametrize("wing", ["batch", "glassbox", "replay"])
def test_wing_may_be_absent(wing: str, tmp_path: Path) -> None:
    rooms = rooms_of("server")
    del rooms[wing]
    assert lint(tmp_path, "server", rooms) == ""


def test_spine_of_the_server_must_not_import_a_wing(tmp_path: Path) -> None:
    rooms = rooms_of("server")
    rooms["generation"] = "import server.glassbox\n"
    assert "server.generation is not allowed to import server.glassbox" in lint(
        tmp_path, "server", rooms
    )


def test_wings_must_not_import_each_other(tmp_path: Path) -> None:
    rooms = rooms_of("server")
    rooms["batch"] = "import server.replay\n"
    assert "server.batch is not allowed to import server.replay" in lint(tmp_path, "server", rooms)
