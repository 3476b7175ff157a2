"""Hooks of setuptools for the wheel and the source archive. pyproject.toml names them.

- Of `loadtest`, the wheel has only the modules that `penstock bench` imports.
- An index shows the README without the files next to it, so links to them become absolute.
"""

from __future__ import annotations

import ast
import os
import re
from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.egg_info import egg_info

ROOT = Path(__file__).resolve().parents[2]
COMMAND = "loadtest.cli"  # `penstock bench`
# The address of the repository, such as https://example.org/penstock.
URL_VARIABLE = "PROJECT_URL"
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https?:|#)([^)]+)\)")
Module = tuple[str, str, str]  # package, name, file


def bench_modules() -> set[str]:
    """Return the modules of `loadtest` that its command line imports, directly or not."""
    found: set[str] = set()
    to_read = ["loadtest", COMMAND]
    while to_read:
        name = to_read.pop()
        if name in found:
            continue
        found.add(name)
        to_read += imported(_file_of(name))
    return found


def imported(file: Path) -> list[str]:
    """Return the modules of `loadtest` that a file imports anywhere, also inside functions."""
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
    return [name for name in names if name.startswith("loadtest") and _file_of(name).exists()]


def _file_of(name: str) -> Path:
    path = ROOT.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def absolute_links(text: str, url: str) -> str:
    """Return the README with absolute links. Without a URL its links are plain text."""

    def replace(link: re.Match[str]) -> str:
        is_image, label, target = link[1] == "!", link[2], link[3]
        if not url:
            return "" if is_image else label
        kind = "raw" if is_image else "blob"
        return f"{link[1]}[{label}]({url.rstrip('/')}/{kind}/HEAD/{target})"

    return LINK.sub(replace, text)


class PackedModules(build_py):
    """Copies the modules of a wheel. An editable installation has all modules of the tree."""

    def find_package_modules(self, package: str, package_dir: str) -> list[Module]:
        modules: list[Module] = super().find_package_modules(package, package_dir)
        if package != "loadtest" or self.editable_mode:
            return modules
        packed = {*bench_modules(), "loadtest.__init__"}
        return [module for module in modules if f"{package}.{module[1]}" in packed]

    def get_source_files(self) -> list[str]:
        """The source archive also needs these hooks."""
        hooks = [Path(__file__).relative_to(ROOT), Path("deploy/release/__init__.py")]
        files: list[str] = super().get_source_files()
        return [*files, "deploy/__init__.py", *map(str, hooks)]


class PublishedMetadata(egg_info):
    """Writes the metadata: the README with absolute links, and the project's URLs."""

    def finalize_options(self) -> None:
        super().finalize_options()
        url = os.environ.get(URL_VARIABLE, "").rstrip("/")
        metadata = self.distribution.metadata
        metadata.long_description = absolute_links(metadata.long_description or "", url)
        if url:
            pages = {"Source": "", "Documentation": "/tree/HEAD/docs", "Issues": "/issues"}
            changes = "/blob/HEAD/CHANGELOG.md"
            metadata.project_urls = {name: url + page for name, page in pages.items()}
            metadata.project_urls["Changelog"] = url + changes
