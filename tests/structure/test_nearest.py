"""`make check` finds the tests of a changed file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.nearest import FEW, changed_files, nearest_tests


def write(root: Path, name: str, text: str = "") -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_changed_files_lists_edited_and_new_files(tmp_path: Path) -> None:
    write(tmp_path, "kept.py")
    write(tmp_path, "edited.py")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    write(tmp_path, "edited.py", "x = 1\n")
    write(tmp_path, "folder/new file.py")
    assert sorted(changed_files(tmp_path)) == ["edited.py", "folder/new file.py"]


def test_changed_module_runs_the_test_that_mirrors_it(tmp_path: Path) -> None:
    write(tmp_path, "server/text/stop.py")
    write(tmp_path, "tests/server/text/test_stop.py")
    write(tmp_path, "tests/server/test_other.py", "from server.text.stop import StopMatcher\n")
    assert nearest_tests(["server/text/stop.py"], tmp_path) == ["tests/server/text/test_stop.py"]


def test_changed_module_without_a_mirror_runs_the_tests_that_import_it(tmp_path: Path) -> None:
    write(tmp_path, "server/text/stop.py")
    write(tmp_path, "tests/support/rig.py")
    write(tmp_path, "tests/test_a.py", "from server.text.stop import StopMatcher\n")
    write(tmp_path, "tests/test_b.py", "from server.text import stop\n")
    write(
        tmp_path, "tests/test_c.py", "from server.text.stopper import x\nimport tests.support.rig\n"
    )
    assert nearest_tests(["server/text/stop.py"], tmp_path) == [
        "tests/test_a.py",
        "tests/test_b.py",
    ]
    assert nearest_tests(["tests/support/rig.py"], tmp_path) == ["tests/test_c.py"]


def test_changed_test_runs_itself_and_deleted_files_run_nothing(tmp_path: Path) -> None:
    write(tmp_path, "tests/test_a.py")
    changed = ["tests/test_a.py", "tests/test_deleted.py", "engine/deleted.py", "README.md"]
    assert nearest_tests(changed, tmp_path) == ["tests/test_a.py"]


def test_module_that_many_tests_import_is_left_to_make_test(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, "engine/errors.py")
    for number in range(FEW + 1):
        write(tmp_path, f"tests/test_{number}.py", "from engine.errors import ConfigError\n")
    assert nearest_tests(["engine/errors.py"], tmp_path) == []
    assert "engine/errors.py is imported by 9 test files" in capsys.readouterr().out
