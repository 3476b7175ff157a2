"""Delete a wing in a copy of the tree and try the rest: `python -m tests.structure.without_wing`.

A wing is a folder, its line in WINGS, its commands with their lines, and its tests. The tests of a
wing are those of its folder's mirror, those of tests/e2e/WING, those that import it, and those of
PARTS, which use it over HTTP or name its files.

tests/engine is not run: the engine does not import the server.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.structure.measure import ROOT, imports_of
from tests.support.wings import PARTS, lines_of, modules_of

QUICK = "not slow and not gpu and not clients and not ui"
NO_FOLDERS = ("data", "engine", "support", "__pycache__")  # below tests


def copy_of_tree(target: Path) -> None:
    """Copy every file of the repository that git does not ignore. The copy is a repository, too."""
    names = subprocess.check_output(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=ROOT, text=True
    )
    for name in filter(None, names.split("\0")):
        file = ROOT / name
        if file.is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, target / name, follow_symlinks=False)
    for command in (["init", "-q"], ["add", "-A"]):
        subprocess.run(["git", *command], cwd=target, check=True)


def delete(root: Path, name: str) -> list[str]:
    """Delete a wing in a copy of the tree. Return the test files that went with it."""
    parts = PARTS[name]
    for folder in parts.folders:
        shutil.rmtree(root / folder)
    modules = modules_of(name)
    files = {root.joinpath(*module.split(".")).with_suffix(".py") for module in modules}
    tests = {file for file in files if file.is_relative_to(root / "tests")}
    for file in files - tests:
        file.unlink(missing_ok=True)  # a package has been deleted as a folder
    for changed, pattern in lines_of(name).items():
        _drop_lines(root / changed, pattern)
    tests |= {file for pattern in parts.tests for file in root.glob(pattern)}
    mirrors = [*parts.folders, f"e2e/{name}"]
    tests |= {file for folder in mirrors for file in (root / "tests" / folder).rglob("*.py")}
    tests |= _importers(root, {*modules, *(_module(root, file) for file in tests)})
    for file in tests:
        file.unlink()
    return sorted(str(file.relative_to(root)) for file in tests)


def _drop_lines(file: Path, pattern: str) -> None:
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [line for line in lines if not re.search(pattern, line.rstrip())]
    file.write_text("".join(kept), encoding="utf-8")


@cache
def needed_by(source: str) -> frozenset[str]:
    """Return the modules and names of this repository that a source text imports."""
    return frozenset(imports_of(source, ("engine", "server", "loadtest", "tests")))


def _importers(root: Path, gone: Iterable[str]) -> set[Path]:
    """Return the files below tests/ that import a deleted module, directly or by another test."""
    files = {file: needed_by(file.read_text(encoding="utf-8")) for file in _tests(root)}
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


@dataclass(frozen=True)
class Result:
    """The tree without a wing: the test files that were deleted with it, and what failed."""

    name: str
    deleted: int
    passed: int
    seconds: float
    failed: tuple[str, ...]  # programs that ended with another status than 0

    def __str__(self) -> str:
        outcome = f"FAILED: {', '.join(self.failed)}" if self.failed else "the rest is green"
        return (
            f"without {self.name}: {self.deleted} test files deleted, {self.passed} tests passed, "
            f"{self.seconds:.0f} s, {outcome}"
        )


def try_without(name: str, folders: Sequence[str] = (), workers: int = 0) -> Result:
    """Lint, serve and test a copy of the tree without a wing. Their output is printed.

    `folders` has the tests to run, by default all but those of the engine.
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"without-{name}-") as directory:
        root = Path(directory) / "tree"
        copy_of_tree(root)
        deleted = delete(root, name)
        chosen = [folder for folder in folders or _all_folders() if (root / folder).is_dir()]
        if not chosen:
            sys.exit(f"without {name} there are no tests in {', '.join(folders)}")
        log = root.with_name("log")
        programs = {
            "ruff check": [_tool("ruff"), "check", "-q"],
            "ruff format": [_tool("ruff"), "format", "-q", "--check"],
            "mypy": [_tool("mypy")],
            "lint-imports": [_tool("lint-imports"), "--no-cache"],
            "server": [sys.executable, "-m", "tests.structure.serve_without", name],
            "pytest": [
                *(sys.executable, "-m", "pytest", "-q", "-m", QUICK, "-p", "no:cacheprovider"),
                *(("-n", str(workers), "--dist", "loadfile") if workers else ()),
                *chosen,
            ],
        }
        failed = [label for label, command in programs.items() if _run(command, root, log)]
        counts = re.findall(r"\b(\d+) passed\b", log.read_text(encoding="utf-8"))
    passed = int(counts[-1]) if counts else 0
    return Result(name, len(deleted), passed, time.monotonic() - began, tuple(failed))


def _all_folders() -> list[str]:
    names = sorted(os.listdir(ROOT / "tests"))
    return [f"tests/{name}" for name in names if name not in NO_FOLDERS]


def _tool(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


def _run(command: list[str], root: Path, log: Path) -> int:
    """Run a program in the copy, print its output, and append it to `log`. Return its status."""
    changed = {"PYTHONPATH": str(root), "TEST_THOROUGH": ""}
    with log.open("a", encoding="utf-8") as output:
        process = subprocess.Popen(
            command, cwd=root, env=os.environ | changed, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                output.write(line)
                print(line, end="", flush=True)
    return process.returncode


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.structure.without_wing")
    parser.add_argument("wings", nargs="*", choices=[[], *PARTS], help="default: each in turn")
    parser.add_argument("--folders", nargs="*", default=(), help="of tests that are run")
    parser.add_argument("--workers", type=int, default=0, help="processes of pytest-xdist")
    given = parser.parse_args()
    names = given.wings or PARTS
    results = [try_without(name, given.folders, given.workers) for name in names]
    print(*results, sep="\n")
    sys.exit(any(result.failed for result in results))


if __name__ == "__main__":
    main()
