"""Each wing can be deleted with its folder, its lines and its tests: the rest stays green."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from server.app import ROUTERS
from tests.structure.measure import ROOT
from tests.structure.without_wing import Result, copy_of_tree, delete, needed_by
from tests.support.wings import (
    PARTS,
    absent_wings,
    is_of_absent_wing,
    lines_of,
    modules_of,
)

WINGS = [name for name in PARTS if name not in absent_wings()]
SECONDS = 2 * 3600  # for one wing, on a machine that does other things too


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
@pytest.mark.parametrize("name", WINGS)
def test_tree_without_a_wing_is_green_and_serves(name: str) -> None:
    command = [sys.executable, "-m", "tests.structure.without_wing", name]
    command += ["--workers", str(os.cpu_count())]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert f"without {name}: " in done.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the tree. A test that deletes a wing restores the files."""
    root = tmp_path_factory.mktemp("without") / "tree"
    copy_of_tree(root)
    return root


def git(root: Path, *arguments: str) -> list[str]:
    command = ["git", *arguments]
    return subprocess.check_output(command, cwd=root, text=True).splitlines()


@pytest.mark.parametrize("name", WINGS)
@pytest.mark.variants(1)
def test_delete_removes_a_wing_and_no_other_line(tree: Path, name: str) -> None:
    deleted = delete(tree, name)
    lost = git(tree, "ls-files", "--deleted")
    lines = [line for line in git(tree, "diff", "-U0", "--diff-filter=M") if line[:1] in "+-"]
    changed = {line[6:] for line in lines if line.startswith("+++ b/")}
    dropped = [line[1:].strip() for line in lines if line[0] == "-" and line[:3] != "---"]
    left = {file: needed_by(file.read_text(encoding="utf-8")) for file in tree.rglob("*.py")}
    git(tree, "checkout", "-q", "--", ".")

    parts = PARTS[name]
    folders = tuple(f"{folder}/" for folder in parts.folders)
    files = {f"{module.replace('.', '/')}.py" for module in modules_of(name)}
    product = {path for path in lost if not path.startswith("tests/")}
    assert {path for path in product if not path.startswith(folders)} <= files
    assert {path for path in lost if path.startswith("tests/")} >= set(deleted)
    assert changed == set(lines_of(name))
    assert not [line for line in lines if line[0] == "+" and line[:3] != "+++"]
    # The import and the entry of each.
    commands = [command for command in parts.commands if command != "engine_batch"]
    assert len(dropped) == 2 * (1 + len(commands) + len(parts.cases) + len(parts.fuzzed))
    for module in modules_of(name):
        users = [
            file.relative_to(tree)
            for file, names in left.items()
            if any(each == module or each.startswith(f"{module}.") for each in names)
        ]
        assert not users, module


@pytest.mark.parametrize("name", WINGS)
def test_parts_of_a_wing_exist(name: str) -> None:
    parts = PARTS[name]
    for module in modules_of(name):
        path = ROOT.joinpath(*module.split("."))
        assert path.is_dir() or path.with_suffix(".py").is_file(), module
    for pattern in parts.tests:
        assert list(ROOT.glob(pattern)) or is_of_absent_wing(pattern), pattern
    paths = {getattr(route, "path", "") for router in ROUTERS for route in router.routes}
    if parts.route:
        assert {parts.route, f"{parts.route}{{path:path}}"} & paths


def test_every_wing_of_the_application_has_parts() -> None:
    lines = (ROOT / "server/app.py").read_text(encoding="utf-8").splitlines()
    named = [line.strip().partition(".")[0] for line in lines if line.endswith(".WING,")]
    assert named == WINGS


def test_result_names_the_programs_that_failed() -> None:
    green = Result("batch", deleted=3, passed=40, seconds=1.6, failed=())
    assert str(green) == (
        "without batch: 3 test files deleted, 40 tests passed, 2 s, the rest is green"
    )
    assert str(Result("batch", 3, 40, 1.6, ("pytest",))).endswith("FAILED: pytest")


def test_path_of_a_wing_that_is_there_is_of_no_absent_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_of_absent_wing("server/generation/no_such_file.py")
    if "batch" in WINGS:
        assert not is_of_absent_wing("server/batch/runner.py")
        monkeypatch.setattr("tests.support.wings.ROOT", ROOT / "docs")  # has no such folders
    assert is_of_absent_wing("server/batch/runner.py")
    assert is_of_absent_wing("tests/e2e/batch/test_batches.py")
    assert not is_of_absent_wing("server/generation/no_such_file.py")
