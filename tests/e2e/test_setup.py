"""`make setup` and `make serve`, without installing anything."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_make_setup_with_venv_of_another_python_replaces_it(tmp_path: Path) -> None:
    """Otherwise the old link to the interpreter would stay and miss the new standard library."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    python, pip = tmp_path / ".venv/bin/python3", tmp_path / "nothing/pip"
    for link, target in ((python, "/bin/false"), (pip, "/bin/true")):
        link.parent.mkdir(parents=True)
        link.symlink_to(target)
    command = ["make", "setup", f"PYTHON={sys.executable}", "BIN=nothing"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert subprocess.run([python, "-c", "import ssl"]).returncode == 0


def test_make_serve_installs_no_test_tools() -> None:
    """Only `make setup` installs the extra `dev`. `make -n` prints what would run."""
    for target, is_for_tests in (("serve", False), ("setup", True)):
        command = ["make", "-n", "-B", target]
        printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
        assert ("[dev]" in printed.stdout) == is_for_tests, target
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split(r"[<>=~!\[ ]", line)[0] for line in project["dependencies"]}
    assert not needed & {"pytest", "ruff", "mypy", "import-linter", "hypothesis", "transformers"}
