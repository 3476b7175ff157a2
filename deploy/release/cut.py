"""`python -m deploy.release.cut 0.2.0` gives the tree a version and cuts the changelog.

The version is the one of pyproject.toml. Files that cannot read it have a copy, which this program
writes and a test compares: the Helm chart, the labels of the images, and the tags of Ray's image.
"""

from __future__ import annotations

import datetime
import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# For each file: what stands before the version.
COPIES = {
    "deploy/docker/Dockerfile.cpu": "ARG VERSION=",
    "deploy/docker/Dockerfile.cuda": "ARG VERSION=",
    "deploy/helm/penstock/Chart.yaml": r"(?:version|appVersion): ",
    "deploy/ray/Dockerfile": "penstock-ray:",
    "deploy/ray/rayservice.yaml": "penstock-ray:",
}
VERSION = re.compile(r"\d+\.\d+\.\d+(?:rc\d+)?")
UNRELEASED = "## Unreleased\n"


def current_version(root: Path) -> str:
    """Return the version in pyproject.toml."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return str(project["version"])


def versions_in_copies(root: Path) -> dict[str, list[str]]:
    """Return the versions that each file of COPIES has."""
    found = {}
    for name, before in COPIES.items():
        text = (root / name).read_text(encoding="utf-8")
        found[name] = re.findall(rf"{before}({VERSION.pattern})", text)
    return found


def cut(root: Path, version: str, day: datetime.date) -> None:
    """Write the version, and give the unreleased changes a heading with it.

    Raises ValueError for a version of another form, and for a changelog without new changes.
    """
    if not VERSION.fullmatch(version):
        raise ValueError(f"{version} is no version such as 0.2.0 or 0.2.0rc1")
    changelog = root / "CHANGELOG.md"
    text = changelog.read_text(encoding="utf-8")
    before, found, after = text.partition(UNRELEASED)
    changes = after.partition("\n## ")[0].strip()
    if not found or not changes:
        raise ValueError("CHANGELOG.md has no changes below '## Unreleased'")
    heading = f"\n## {version} - {day.isoformat()}\n"
    changelog.write_text(before + UNRELEASED + heading + after, encoding="utf-8")
    old = re.escape(current_version(root))
    for name, prefix in {"pyproject.toml": '^version = "', **COPIES}.items():
        file = root / name
        source = file.read_text(encoding="utf-8")
        source = re.sub(rf"({prefix}){old}", rf"\g<1>{version}", source, flags=re.MULTILINE)
        file.write_text(source, encoding="utf-8")


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m deploy.release.cut VERSION\n")
        return 2
    try:
        cut(ROOT, sys.argv[1], datetime.datetime.now(datetime.UTC).date())
    except ValueError as error:
        sys.stderr.write(f"cut: {error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
