"""The server as in a cluster: a read-only root, an unknown uid and no home folder."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from server import exit_codes
from tests.deploy.dockerfile import DOCKER, ROOT, stages
from tests.support import web
from tests.support.process import START_S, eventually

UID = 54321
SERVE = [sys.executable, "-m", "server", "serve", "demo", "--port", "0", "--threads", "1"]
RUNNER = Path(__file__).with_name("read_only_root.py")


def image_environment(cache: Path) -> dict[str, str]:
    """Return the image's environment, with `cache` instead of /cache and the tests' Python."""
    *_, final = stages(DOCKER / "Dockerfile.cpu")
    environment = {k: v.replace("/cache", str(cache)) for k, v in final.environment.items()}
    return environment | {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}


@contextlib.contextmanager
def running(
    command: list[str], cache: Path, environment: dict[str, str], log: Path
) -> Iterator[psutil.Process]:
    if os.geteuid() != 0 or shutil.which("unshare") is None or shutil.which("setpriv") is None:
        pytest.skip("needs root, unshare and setpriv to make a mount namespace")
    probe = subprocess.run(["unshare", "--mount", "mount", "--make-rprivate", "/"])
    if probe.returncode:
        pytest.skip("mount namespaces are not allowed here")
    namespace = ["unshare", "--mount", sys.executable, RUNNER, cache, str(UID)]
    with (
        log.open("wb") as stream,
        subprocess.Popen([*namespace, *command], stderr=stream, env=environment) as process,
    ):
        try:
            yield psutil.Process(process.pid)
        finally:
            process.terminate()
            print(log.read_text())  # pytest shows it if the test fails


@pytest.fixture
def cache() -> Iterator[Path]:
    """Return a folder with a short path, which Unix sockets need; tmp_path is too long."""
    with tempfile.TemporaryDirectory(prefix="cache-") as folder:
        yield Path(folder)


@pytest.mark.slow
def test_serve_on_read_only_root_writes_only_to_cache(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    with running(SERVE, cache, image_environment(cache), log) as server:
        found = eventually(
            lambda: (
                re.search(r"listening on http://\S+:(\d+),", log.read_text())
                or not server.is_running()
                or server.status() == psutil.STATUS_ZOMBIE
            ),
            "the server listens",
            START_S,
        )
        assert isinstance(found, re.Match), log.read_text()
        url = f"http://127.0.0.1:{found[1]}"
        eventually(lambda: web.get(f"{url}/ready").status_code == 200, "ready", START_S)
        body = {"model": "demo", "prompt": "Hello", "max_tokens": 4}
        answer = web.post(f"{url}/v1/completions", json=body, timeout=60)
        assert answer.status_code == 200, answer.text
        assert {process.uids().effective for process in [server, *server.children()]} == {UID}
        seen = Path(f"/proc/{server.pid}/root{cache}")
        # Every other file system is read-only, so all written files are here.
        left = [path.name for path in seen.iterdir()]
        assert left == ["penstock"], "the socket's folder is removed after connecting"
        assert list((seen / "penstock" / "kernels").iterdir())
        server.terminate()
        assert server.wait(30) == exit_codes.CLEAN, log.read_text()
    assert "Traceback" not in log.read_text()
    assert "Read-only file system" not in log.read_text()


def test_serve_without_writable_folder_names_tmpdir(cache: Path, tmp_path: Path) -> None:
    log = tmp_path / "stderr"
    environment = image_environment(Path("/nonexistent"))
    command = ["sh", "-c", f"cd / && exec {shlex.join(SERVE)}"]
    with running(command, cache, environment, log) as server:
        assert server.wait(60) == exit_codes.BAD_CONFIG
    [line] = log.read_text().splitlines()
    assert "Set TMPDIR to a folder that can be written" in line
