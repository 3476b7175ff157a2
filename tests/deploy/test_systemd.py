"""deploy/systemd/penstock.service: systemd accepts it, and it fits the server."""

from __future__ import annotations

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from server import exit_codes
from server.config import ServerConfig
from server.settings import settings

UNIT = Path(__file__).resolve().parents[2] / "deploy" / "systemd" / "penstock.service"


@pytest.fixture
def service() -> configparser.SectionProxy:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(UNIT)
    return unit["Service"]


def test_unit_is_valid_for_systemd(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("needs systemd-analyze (Debian: systemd)")
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/penstock/.venv/bin/penstock", "/bin/true"))
    done = subprocess.run(["systemd-analyze", "verify", copy], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_unit_runs_serve_with_flags_that_exist(service: configparser.SectionProxy) -> None:
    _, command, _, *arguments = shlex.split(service["ExecStart"])
    flags = {setting.flag for setting in settings()}
    assert command == "serve"
    given = [argument for argument in arguments if argument.startswith("-")]
    assert given
    assert set(given) <= flags


def test_unit_waits_for_the_drain_and_does_not_restart_a_bad_configuration(
    service: configparser.SectionProxy,
) -> None:
    assert float(service["TimeoutStopSec"]) >= ServerConfig().drain_timeout + 15
    assert service["Restart"] == "on-failure"
    assert int(service["RestartPreventExitStatus"]) == exit_codes.BAD_CONFIG
