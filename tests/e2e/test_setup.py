"""`make setup` and `make serve`, without installing anything."""

from __future__ import annotations

import os
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


def test_readme_start_has_each_command_alone_in_a_block() -> None:
    start = (ROOT / "README.md").read_text().partition("## Start")[2].partition("\n## ")[0]
    blocks = re.findall(r"^```bash\n(.*?)^```", start, re.MULTILINE | re.DOTALL)
    assert blocks[1:3] == ["make serve\n", "make test\n"]
    assert "$" not in "".join(blocks), "a command with a variable cannot be copied"


def test_ci_runs_make_test_in_a_clone_with_nothing_next_to_it(tmp_path: Path) -> None:
    """A `make` that notes its place stands in for the installation and the tests."""
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT / ".ci", checkout / ".ci")
    data = tmp_path / "shared" / "assets"
    data.mkdir(parents=True)
    (data / "a").write_text("")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=checkout, check=True)
    programs, places = tmp_path / "bin", tmp_path / "temporary"
    programs.mkdir()
    places.mkdir()
    make = programs / "make"
    make.write_text('#!/bin/sh\necho "$@" $(ls .. -A) $(ls -A ../shared/assets)\n')
    make.chmod(0o755)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "TMPDIR": str(places)}
    command = [checkout / ".ci" / "run"]
    done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "test gitconfig penstock",
        "test-assets gitconfig penstock shared a",
    ]
    assert not list(places.iterdir()), "the clone is removed"
