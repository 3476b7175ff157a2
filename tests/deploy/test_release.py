"""Cutting a release, and what the wheel's build changes, without building one."""

from __future__ import annotations

import datetime
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from deploy.release.build_hooks import ROOT, absolute_links, bench_modules
from deploy.release.cut import COPIES, current_version, cut, versions_in_copies
from deploy.site.pages import TOP_PAGES, navigation

DAY = datetime.date(2026, 12, 1)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("pyproject.toml", *COPIES):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n### Added\n\n- A.\n")
    return tmp_path


def test_files_with_a_copy_of_the_version_have_that_of_pyproject() -> None:
    version = current_version(ROOT)
    for name, found in versions_in_copies(ROOT).items():
        assert found, name
        assert set(found) == {version}, name


def test_cut_writes_the_version_everywhere_and_dates_the_changes(tree: Path) -> None:
    before = versions_in_copies(tree)
    cut(tree, "0.9.0rc1", DAY)
    assert current_version(tree) == "0.9.0rc1"
    assert versions_in_copies(tree) == {n: ["0.9.0rc1"] * len(v) for n, v in before.items()}
    changelog = (tree / "CHANGELOG.md").read_text()
    assert "## Unreleased\n\n## 0.9.0rc1 - 2026-12-01\n\n### Added\n\n- A.\n" in changelog
    with pytest.raises(ValueError, match="no changes"):
        cut(tree, "0.9.0", DAY)


def test_cut_with_a_version_of_another_form_changes_nothing(tree: Path) -> None:
    with pytest.raises(ValueError, match=r"v1 is no version"):
        cut(tree, "v1", DAY)
    assert current_version(tree) == current_version(ROOT)


def test_packed_modules_of_loadtest_are_those_that_bench_imports() -> None:
    modules = bench_modules()
    assert {"loadtest", "loadtest.cli", "loadtest.session", "loadtest.html_page"} <= modules
    assert not {name for name in modules if name.split(".")[1:2] in (["gpu"], ["micro"], ["peers"])}
    external = {"locust", "torch", "transformers", "deploy", "engine", "server"}
    code = "import sys, loadtest.cli, " + ", ".join(sorted(modules))
    assert not external & set(imported_by(code))


def imported_by(code: str) -> list[str]:
    command = [sys.executable, "-c", f"{code}; print(*sys.modules)"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("", "See the tour and https://a.b, .\n[x](https://a.b) [y](#z)"),
        (
            "https://h/penstock",
            "See [the\ntour](https://h/penstock/blob/HEAD/docs/a.md#b) and https://a.b, "
            "![p](https://h/penstock/raw/HEAD/docs/p.png).\n[x](https://a.b) [y](#z)",
        ),
    ],
)
def test_links_of_the_readme_are_absolute_or_text(url: str, expected: str) -> None:
    text = (
        "See [the\ntour](docs/a.md#b) and https://a.b, ![p](docs/p.png).\n[x](https://a.b) [y](#z)"
    )
    assert absolute_links(text, url).split() == expected.split()


def test_navigation_of_the_site_has_every_page_once() -> None:
    pages: list[str] = []
    for section in navigation():
        for value in section.values():
            pages += value if isinstance(value, list) else [str(value)]
    names = {page.name for page in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert sorted(pages) == sorted(names | {"index.md"} | set(TOP_PAGES.values()))
