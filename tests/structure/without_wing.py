"""Delete a wing in a copy of the tree and try the rest: `python -m tests.structure.without_wing`.

A wing is a folder, its line in WINGS, its commands with their lines, and its tests. The tests of a
wing are those of its folder's mirror, those that import it, and those of PARTS, which use it over
HTTP or name its files.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tests.structure.measure import ROOT, imports

QUICK = "not slow and not gpu and not clients and not ui"


@dataclass(frozen=True)
class Parts:
    """A wing: paths from the root of the repository."""

    folders: tuple[str, ...]
    commands: tuple[str, ...] = ()  # files in server/cli
    cases: tuple[str, ...] = ()  # files in loadtest/micro
    tests: tuple[str, ...] = ()  # globs


PARTS = {
    "replay": Parts(("server/replay",), ("verify", "compare", "explain")),
    "batch": Parts(("server/batch",), ("run_batch", "engine_batch")),
    "cohere": Parts(("server/api/cohere",)),
    "vllm": Parts(("server/api/vllm",)),
    "llamacpp": Parts(("server/api/llamacpp",)),
    "glassbox": Parts(("server/glassbox", "server/ui"), cases=("watch_steps", "watch_cost")),
}


def copy_of_tree(target: Path) -> None:
    """Copy every file of the repository that git knows."""
    names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
    for name in filter(None, names.split("\0")):
        file = ROOT / name
        if file.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target / name, follow_symlinks=False)


def delete(root: Path, name: str) -> list[str]:
    """Delete a wing in a copy of the tree. Return the test files that went with it."""
    parts = PARTS[name]
    gone = {folder.replace("/", ".") for folder in parts.folders}
    for folder in parts.folders:
        shutil.rmtree(root / folder)
    modules = [f"server.cli.{command}" for command in parts.commands]
    modules += [f"loadtest.micro.{case}" for case in parts.cases]
    for module in modules:
        root.joinpath(*module.split(".")).with_suffix(".py").unlink()
    gone |= set(modules)
    line = rf"\b{name}\.WING\b|^from server\.\S+ import wing as {name}$"
    _drop_lines(root / "server/app.py", line)
    for command in parts.commands:
        _drop_lines(root / "server/cli/main.py", rf"\({command}\)$|^from server\.cli\.{command} ")
    for case in parts.cases:
        _drop_lines(root / "loadtest/micro/__main__.py", rf"\b{case}\b")
    tests = {file for pattern in parts.tests for file in root.glob(pattern)}
    tests |= {file for folder in parts.folders for file in (root / "tests" / folder).rglob("*.py")}
    gone |= {_module(root, file) for file in tests}
    tests |= _importers(root, gone)
    for file in tests:
        file.unlink(missing_ok=True)
    return sorted(str(file.relative_to(root)) for file in tests)


def _drop_lines(file: Path, pattern: str) -> None:
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not re.search(pattern, line.rstrip())]
    file.write_text("".join(kept), encoding="utf-8")


def _importers(root: Path, gone: Iterable[str]) -> set[Path]:
    """Return the files below tests/ that import a deleted module, directly or by another test."""
    files = {
        file: imports(file, ("engine", "server", "loadtest", "tests")) for file in _tests(root)
    }
    gone, found = set(gone), set[Path]()
    while new := {f for f in files.keys() - found if _needs(files[f], gone)}:
        found |= new
        gone |= {_module(root, file) for file in new}
    return found


def _tests(root: Path) -> list[Path]:
    return [file for file in (root / "tests").rglob("*.py") if file.name != "__init__.py"]


def _needs(names: Iterable[str], gone: set[str]) -> bool:
    return any(name == module or name.startswith(f"{module}.") for name in names for module in gone)


def _module(root: Path, file: Path) -> str:
    return ".".join(file.relative_to(root).with_suffix("").parts)


def try_without(name: str, folders: list[str]) -> int:
    """Run the tests of `folders` without a wing. Return pytest's status."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "tree"
        copy_of_tree(root)
        tests = delete(root, name)
        print(f"without {name}: {len(tests)} test files went with it", flush=True)
        environment = {**os.environ, "PYTHONPATH": str(root)}
        command = [sys.executable, "-m", "pytest", "-q", "-m", QUICK, "-p", "no:cacheprovider"]
        command += [folder for folder in folders if (root / folder).exists()]
        return subprocess.run(command, cwd=root, env=environment, check=False).returncode


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.structure.without_wing")
    parser.add_argument("wings", nargs="*", choices=[[], *PARTS], help="default: each in turn")
    parser.add_argument("--folders", nargs="*", default=["tests"], help="of tests that are run")
    given = parser.parse_args()
    failed = [name for name in given.wings or PARTS if try_without(name, given.folders)]
    sys.exit(f"failed without: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
