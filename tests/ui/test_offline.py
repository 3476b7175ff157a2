"""The pages of the wheel, without a network: all of them work, and no other host is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ui.listed_pages import page_ids
from tests.ui.vendor import FOLDER, download

pytestmark = [pytest.mark.ui, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
ISOLATED = ["unshare", "--net", "sh", "-c"]
FIRST_LOAD = 90_000  # bytes


def test_wheel_serves_all_pages_without_a_network(tmp_path: Path) -> None:
    if subprocess.run([*ISOLATED, "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to make a network namespace (unshare --net)")
    wheel = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), "."]
    subprocess.run(wheel, cwd=ROOT, check=True, timeout=300)
    [file] = tmp_path.glob("penstock-*.whl")
    installed = tmp_path / "installed"
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target"]
    subprocess.run([*install, str(installed), str(file)], check=True, timeout=300)
    script = shutil.copy(ROOT / "tests" / "ui" / "offline_visit.py", tmp_path / "visit.py")
    # The libraries are those of this environment, the package is the wheel's; there is no node.
    folders = [*{Path(shutil.which(name) or "/").parent for name in ("chromium", "sh")}]
    env = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "PATH": os.pathsep.join(map(str, folders)),
        "HOME": str(tmp_path),
    }
    command = f"ip link set lo up; exec {sys.executable} {script} {' '.join(page_ids())}"
    shell = [*ISOLATED, f"PATH=$PATH:/sbin:/usr/sbin; {command}"]
    done = subprocess.run(
        shell, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["faults"] == []
    assert {url.split("/")[2] for url in found["requests"]} == {"127.0.0.1:8765"}
    assert len(found["texts"]) == len(page_ids())
    for text in found["texts"]:
        assert len(text) > 30, text
        assert "could not be loaded" not in text
        assert "This page failed" not in text
    assert 30_000 < found["bytes"] <= FIRST_LOAD


def test_vendored_files_are_those_of_npm() -> None:
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    for name, content in download().items():
        assert (FOLDER / name).read_bytes() == content, name
