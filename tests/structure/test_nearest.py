"""`make check` finds the tests of a changed file."""

from __future__ import annotations

import json
import random
import subprocess
from pathlib import Path

import pytest

from tests.nearest import ROOT, SECONDS, Nearest, changed_files, nearest_tests, report


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
    found = nearest_tests(["server/text/stop.py"], tmp_path)
    assert found == {"server/text/stop.py": ["tests/server/text/test_stop.py"]}


def test_changed_module_without_a_mirror_runs_the_tests_that_import_it(tmp_path: Path) -> None:
    write(tmp_path, "server/text/stop.py")
    write(tmp_path, "tests/support/rig.py", "from server.text import (\n    parts,\n    stop,\n)\n")
    write(tmp_path, "tests/test_a.py", "from server.text.stop import StopMatcher\n")
    write(tmp_path, "tests/test_b.py", "from server.text import stop\n")
    write(
        tmp_path, "tests/test_c.py", "from server.text.stopper import x\nimport tests.support.rig\n"
    )
    write(tmp_path, "tests/test_d.py", "from server.text import other\n")
    found = nearest_tests(["server/text/stop.py", "tests/support/rig.py"], tmp_path)
    assert found == {
        "server/text/stop.py": ["tests/test_a.py", "tests/test_b.py", "tests/test_c.py"],
        "tests/support/rig.py": ["tests/test_c.py"],
    }


def test_changed_test_runs_itself_and_deleted_files_run_nothing(tmp_path: Path) -> None:
    write(tmp_path, "README.md")
    write(tmp_path, "tests/test_a.py")
    changed = ["tests/test_a.py", "tests/test_deleted.py", "engine/deleted.py", "README.md"]
    assert nearest_tests(changed, tmp_path) == {
        "tests/test_a.py": ["tests/test_a.py"],
        "README.md": [],
    }


@pytest.mark.parametrize("name", ["server/text/pages/page.js", "server/text/pages/new.py"])
def test_file_that_no_test_imports_runs_the_mirrored_folder(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    write(tmp_path, "tests/server/text/test_a.py")
    write(tmp_path, "tests/server/test_b.py")
    assert nearest_tests([name], tmp_path) == {name: ["tests/server/text/test_a.py"]}


def test_long_tests_are_left_out_and_the_rest_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = {"tests/test_0.py": 2 * SECONDS, "tests/test_1.py": 1.0, "tests/test_2.py": SECONDS}
    write(tmp_path, "tests/durations.json", json.dumps(seconds))
    write(tmp_path, "engine/errors.py")
    for name in seconds:
        write(tmp_path, name, "from engine.errors import ConfigError\n")
    found = nearest_tests(["engine/errors.py"], tmp_path)
    assert found == {"engine/errors.py": ["tests/test_1.py"]}
    write(tmp_path, "tests/test_1.py")
    found = nearest_tests(["engine/errors.py"], tmp_path)
    assert found == {"engine/errors.py": ["tests/test_2.py"]}, "one, however long it takes"
    report(found | {"README.md": []})
    assert capsys.readouterr().out.splitlines() == [
        "engine/errors.py: tests/test_2.py",
        "README.md: no test is near, only the rules of the tree",
    ]


def test_every_product_file_has_a_test_near_it() -> None:
    """A sample of the files of the engine and the server; `make check` is never empty."""
    files = [
        file.relative_to(ROOT)
        for folder in ("engine", "server")
        for file in sorted((ROOT / folder).rglob("*"))
        if file.is_file() and "__pycache__" not in file.parts
    ]
    nearest = Nearest(ROOT)
    for file in random.Random(0).sample(files, 40):
        tests = nearest.to(file, SECONDS)
        assert tests, file
        assert all((ROOT / test).is_file() for test in tests)
