"""Run the tests nearest to what changed since the last commit: `python -m tests.nearest`.

The tests mirror the product: `server/text/stop_strings.py` is tested by
`tests/server/text/test_stop_strings.py`. A file without such a test is tested by the tests that
import it, if these are few.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
RULES = "tests/structure"  # always run: they take seconds
FEW = 8  # more test files than these take minutes: leave them to `make test`


def changed_files(root: Path = ROOT) -> list[str]:
    """Return what differs from the last commit, with new files, as paths from the root."""
    status = ["git", "status", "--porcelain", "--untracked-files=all", "--no-renames", "-z"]
    output = subprocess.run(status, cwd=root, check=True, capture_output=True, text=True).stdout
    return [entry[3:] for entry in output.split("\0") if entry]


def nearest_tests(changed: Iterable[str], root: Path = ROOT) -> list[str]:
    """Return the test files nearest to these files, as paths from the root."""
    found: set[str] = set()
    for name in changed:
        path = Path(name)
        if path.suffix == ".py" and (root / path).exists():
            found.update(_nearest(path, root))
    return sorted(found)


def _nearest(path: Path, root: Path) -> Iterable[str]:
    if path.parts[0] == "tests":
        return [str(path)] if path.name.startswith("test_") else _importing(path, root)
    mirrored = Path("tests", path.parent, f"test_{path.stem}.py")
    return [str(mirrored)] if (root / mirrored).exists() else _importing(path, root)


def _importing(path: Path, root: Path) -> Iterable[str]:
    """Return the test files that import this module, or none if they are many."""
    module = ".".join(path.with_suffix("").parts)
    package, _, name = module.rpartition(".")
    imports = f"from {module} import ", f"import {module}\n", f"from {package} import {name}\n"
    found = []
    for test in (root / "tests").rglob("test_*.py"):
        text = test.read_text(encoding="utf-8")
        if any(line in text for line in imports):
            found.append(str(test.relative_to(root)))
    if len(found) <= FEW:
        return found
    print(f"{path} is imported by {len(found)} test files: `make test` runs them")
    return []


def main() -> int:
    tests = [RULES, *nearest_tests(changed_files())]
    print("pytest", *tests, flush=True)
    pytest = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
    return subprocess.run(
        [*pytest, "-m", "not slow and not gpu and not clients", *tests], cwd=ROOT
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
