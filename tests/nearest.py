"""Run the tests nearest to what changed since the last commit: `python -m tests.nearest`.

The tests mirror the product: `server/text/stop_strings.py` is tested by
`tests/server/text/test_stop_strings.py`. A file without such a test is tested by the tests that
import it and by those of the mirrored folder, the shortest first, for SECONDS in all.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from tests.support.durations import FILE, NEW_FILE_S, read_durations

ROOT = Path(__file__).parents[1]
RULES = "tests/structure"  # always run: they take seconds
SECONDS = 40.0  # of tests that two workers share
FILE_S = 0.4  # the imports of a test file
IMPORT = re.compile(r"^ *(?:from ([\w.]+) import (\([^)]*\)|[^\n]*)|import ([\w.]+))", re.MULTILINE)


def changed_files(root: Path = ROOT) -> list[str]:
    """Return what differs from the last commit, with new files, as paths from the root."""
    status = ["git", "status", "--porcelain", "--untracked-files=all", "--no-renames", "-z"]
    output = subprocess.run(status, cwd=root, check=True, capture_output=True, text=True).stdout
    return [entry[3:] for entry in output.split("\0") if entry]


def nearest_tests(changed: Iterable[str], root: Path = ROOT) -> dict[str, list[str]]:
    """Return the test files nearest to each of these files, as paths from the root.

    The files share SECONDS. Each that a test can be near to has at least one.
    """
    present = [Path(name) for name in changed if (root / name).is_file()]
    nearest = Nearest(root)
    return {str(path): nearest.to(path, SECONDS / len(present)) for path in present}


class Nearest:
    """The test files of a tree, the modules that they import, and their seconds."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._seconds = read_durations(root / FILE.relative_to(ROOT))
        self._importing: defaultdict[str, set[Path]] = defaultdict(set)
        for file in (root / "tests").rglob("*.py"):
            for module in _imported(file.read_text(encoding="utf-8")):
                self._importing[module].add(file.relative_to(root))

    def to(self, path: Path, seconds: float) -> list[str]:
        """Return the nearest test files that take these seconds, or one that takes longer."""
        if _is_test(path):
            return [str(path)]
        mirrored = Path("tests", path.parent, f"test_{path.stem}.py")
        if (self._root / mirrored).exists():
            return [str(mirrored)]
        found: list[str] = []
        for name in self._candidates(path):
            seconds -= FILE_S + self._seconds.get(name, NEW_FILE_S)
            if found and seconds < 0:
                break
            found.append(name)
        return found

    def _candidates(self, path: Path) -> Iterator[str]:
        importing = self._tests_that_import(path)
        yield from self._shortest_first(importing)
        yield from self._shortest_first(set(self._folder_of(path)) - importing)

    def _shortest_first(self, tests: Iterable[Path]) -> list[str]:
        """Sort test files. A file of unknown duration, whose tests may all be slow, is last."""
        names = sorted(map(str, tests))
        return sorted(names, key=lambda name: self._seconds.get(name, float("inf")))

    def _tests_that_import(self, path: Path) -> set[Path]:
        """Return the tests that import this module, or import a module of the tests that does."""
        found: set[Path] = set()
        modules, seen = [path], {path}
        while modules and path.suffix == ".py":
            name = ".".join(modules.pop().with_suffix("").parts).removesuffix(".__init__")
            importing = self._importing.get(name, set()) - seen
            seen |= importing
            found |= {file for file in importing if _is_test(file)}
            modules += [file for file in importing if not _is_test(file)]
        return found

    def _folder_of(self, path: Path) -> list[Path]:
        """Return the tests of the mirrored folder, or of the nearest folder above that has some."""
        folder = path.parent if path.parts[0] == "tests" else "tests" / path.parent
        below = [place for place in (folder, *folder.parents) if len(place.parts) > 1]
        for place in below:
            if found := list((self._root / place).glob("test_*.py")):
                return [file.relative_to(self._root) for file in found]
        return []


def _is_test(path: Path) -> bool:
    return path.parts[0] == "tests" and path.match("test_*.py")


def _imported(source: str) -> Iterator[str]:
    """Yield the modules that a source imports, and the names that it imports from them."""
    for package, names, module in IMPORT.findall(source):
        yield package or module
        for name in re.findall(r"\w+", names):
            yield f"{package}.{name}"


def report(nearest: Mapping[str, list[str]]) -> None:
    """Print which tests are run for which file."""
    for name, tests in nearest.items():
        print(f"{name}: {' '.join(tests) or 'no test is near, only the rules of the tree'}")


def main() -> int:
    nearest = nearest_tests(changed_files())
    report(nearest)
    tests = [RULES, *sorted({test for found in nearest.values() for test in found})]
    print("pytest", *tests, flush=True)
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    return subprocess.run(
        [*pytest, "-m", "not slow and not gpu and not clients and not ui", *tests], cwd=ROOT
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
