"""The built wheel: its contents, and its use in an empty environment with an empty home.

`make release` runs these tests with the wheel in `dist/`, which WHEEL names. Else they build it.
`test_documented.py` runs the commands that README and docs print.
"""

from __future__ import annotations

import re
import subprocess
import time
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import httpx2
import pytest

from deploy.release.build_hooks import bench_modules
from deploy.release.cut import current_version
from loadtest.servers import free_ports
from tests.deploy.documented import documented_commands
from tests.deploy.installed import Installed
from tests.support.process import ROOT, eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

START_S = 60.0
GROUPS = ("bench", "import")  # commands with commands
QUESTION = "What is the capital of France?"


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith("/METADATA")]
        return message_from_bytes(archive.read(name))


def test_wheel_has_the_application_and_what_bench_imports(wheel: Path, names: set[str]) -> None:
    info = f"penstock-{current_version(ROOT)}.dist-info"
    assert {name.split("/")[0] for name in names} == {"engine", "server", "loadtest", info}
    packed = {name[:-3].replace("/", ".") for name in names if name.startswith("loadtest/")}
    assert packed == bench_modules() - {"loadtest"} | {"loadtest.__init__"}
    command = ["git", "ls-files", "engine", "server"]
    tracked = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    data = {name for name in tracked.stdout.split() if not name.endswith((".md", ".txt"))}
    assert {name for name in data if (ROOT / name).exists()} <= names
    assert wheel.stat().st_size < 20e6


def test_metadata_has_no_relative_link(wheel: Path) -> None:
    found = metadata(wheel)
    assert found["Version"] == current_version(ROOT)
    text = str(found.get_payload())
    assert QUESTION in text
    assert re.findall(r"\]\((?!https?:|#)[^)]*\)", text) == []
    assert "License-Expression: Apache-2.0" in str(found)


def test_demo_answers_within_a_minute_of_the_installation(
    installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    [port] = free_ports(1)
    log = installed.home.parent / "server.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [str(installed.bin / "penstock"), "serve", "demo", "--port", str(port)],
            cwd=installed.folder,
            env=installed.environment,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        eventually(lambda: is_ready(url), log.read_text(), seconds=400)
        answer = installed.run("penstock", "chat", "--url", url, QUESTION)
        seconds = time.monotonic() - installed.installed_at
        assert "Paris" in answer
        installed.run("penstock", "bench", "run", "--url", url, "--concurrency", "1", timeout=300)
        with capsys.disabled():
            print(f"\npenstock serve demo answered {seconds:.1f} s after the installation")
        assert seconds < START_S
    finally:
        server.terminate()
        assert server.wait(60) == 0, log.read_text()


def is_ready(url: str) -> bool:
    try:
        return httpx2.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


def test_environment_is_consistent_and_every_command_has_its_help(installed: Installed) -> None:
    installed.run("pip", "check")
    assert current_version(ROOT) in installed.run("penstock", "--version")
    overview = installed.run("penstock", "--help")
    listed = overview.partition("Commands")[2]
    commands = set(re.findall(r"^\W*([a-z-]+)\s{2,}\S", listed, re.MULTILINE))
    assert {"serve", "chat", "doctor", "bench"} <= commands
    for command in sorted(commands):
        installed.run("penstock", command, "--help")


def test_documented_commands_are_known_to_the_installed_program(installed: Installed) -> None:
    """Each `penstock` command of README and docs has only options that its --help lists."""
    helps: dict[tuple[str, ...], str] = {}
    unknown = []
    for page, words in documented_commands():
        command = tuple(words[: 2 if words[0] in GROUPS else 1])
        if command not in helps:
            helps[command] = installed.run("penstock", *command, "--help")
        for word in words:
            option = word.split("=")[0]
            if option.startswith("--") and option not in helps[command]:
                unknown.append(f"{page}: {option} of {' '.join(command)}")
    assert unknown == []
