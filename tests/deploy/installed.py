"""The built wheel in an empty environment, and the folders in which its commands run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from tests.support.process import ROOT


def built_wheel() -> Path:
    """Return the wheel that WHEEL names; build it if WHEEL is not set."""
    if named := os.environ.get("WHEEL"):
        return ROOT / named
    subprocess.run(["make", "dist", f"PYTHON={sys.executable}"], cwd=ROOT, check=True)
    [built] = (ROOT / "dist").glob("*.whl")
    return built


class Installed:
    """An environment with the wheel. Its commands run in an empty folder, with an empty home."""

    def __init__(self, folder: Path, wheel: Path) -> None:
        self.folder = folder / "work"
        self.folder.mkdir()
        self.home = folder / "home"
        self.home.mkdir()
        self.bin = folder / "environment" / "bin"
        kept = {k: v for k, v in os.environ.items() if k.startswith("PIP_")}
        self.environment = {"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.home), **kept}
        subprocess.run([sys.executable, "-m", "venv", self.bin.parent], check=True)
        # On a machine without a GPU, torch's CPU build is enough (docs/getting-started.md).
        cpu = ["--extra-index-url", "https://download.pytorch.org/whl/cpu"]
        index = [] if "PIP_FIND_LINKS" in kept else cpu
        self.run("pip", "install", "-q", *index, "-c", str(ROOT / "constraints.txt"), str(wheel))
        self.installed_at = time.monotonic()

    def run(self, *command: str, timeout: float = 900) -> str:
        """Run a command to its end and return its output. Fails with the output of a failure."""
        done = subprocess.run(
            [str(self.bin / command[0]), *command[1:]],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=timeout,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout
