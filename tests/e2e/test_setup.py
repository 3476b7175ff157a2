"""`make setup`, with a program that installs nothing instead of pip."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path


def test_make_setup_with_venv_of_another_python_replaces_it(tmp_path: Path) -> None:
    """Otherwise the old link to the interpreter would stay and miss the new standard library."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(Path(__file__).parents[2] / name, tmp_path)
    python, pip = tmp_path / ".venv/bin/python3", tmp_path / "nothing/pip"
    for link, target in ((python, "/bin/false"), (pip, "/bin/true")):
        link.parent.mkdir(parents=True)
        link.symlink_to(target)
    command = ["make", "setup", f"PYTHON={sys.executable}", "BIN=nothing"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert subprocess.run([python, "-c", "import ssl"]).returncode == 0
