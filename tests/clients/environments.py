"""The environments of the clients, below build/clients: made on demand, with pinned versions."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from tests.support.process import ROOT

FOLDER = ROOT / "build" / "clients"
HERE = Path(__file__).parent
INSTALL_S = 900

# The packages of each runner. Their dependencies are the newest of the index.
PYTHON: dict[str, tuple[str, ...]] = {
    "openai": ("openai==3.54.0",),
}


def python_of(name: str) -> Path:
    """Return the interpreter of a Python client; install its packages if they have changed."""
    packages = PYTHON[name]
    folder = FOLDER / name
    python = folder / "bin" / "python"
    stamp = folder / "packages.json"
    wanted = json.dumps([sys.version, *packages])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [python, "-m", "pip", "--disable-pip-version-check", "install", "-q"]
    subprocess.run([*pip, *packages], check=True, timeout=INSTALL_S)
    stamp.write_text(wanted)
    return python
