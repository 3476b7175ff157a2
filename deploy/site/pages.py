"""Write the sources of the site: the pages of `docs`, and the list of them as its navigation.

`python -m deploy.site.pages FOLDER` fills FOLDER with `zensical.toml` and `pages/`. The navigation
is `docs/README.md`: its sections, and in each section the pages that it links first. Files outside
`docs` that pages link, such as a Helm chart, are copied.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
INDEX = "README.md"
PAGE_LINK = re.compile(r"\]\(([\w./-]+\.md)(?:#[\w-]*)?\)")
OUTSIDE = re.compile(r"\]\(\.\./([\w./-]+)")
TOP_PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
SETTINGS = """\
[project]
site_name = "Penstock"
site_description = "A glass-box model server"
docs_dir = "pages"
site_dir = "site"
nav = {nav}

[project.theme]
font = false  # else each page asks a server of Google
features = ["navigation.sections", "navigation.top", "search.highlight", "content.code.copy"]

[[project.theme.palette]]
media = "(prefers-color-scheme: light)"
scheme = "default"

[[project.theme.palette]]
media = "(prefers-color-scheme: dark)"
scheme = "slate"
"""


def write_site(folder: Path) -> None:
    """Write the sources of the site. The former content of `folder` is deleted."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = folder / "pages"
    shutil.copytree(ROOT / "docs", pages)
    (pages / INDEX).unlink()
    for page in (ROOT / "docs").glob("*.md"):
        text = page.read_text(encoding="utf-8")
        for path in OUTSIDE.findall(text):
            _copy(path, pages)
        target = pages / _page_name(page.name)
        target.write_text(_within_site(text), encoding="utf-8")
    for source, name in TOP_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        (pages / name).write_text(_within_site(text), encoding="utf-8")
    shutil.copy(ROOT / "LICENSE", pages)
    nav = json.dumps(navigation()).replace('": ', '" = ')
    (folder / "zensical.toml").write_text(SETTINGS.format(nav=nav), encoding="utf-8")


def navigation() -> list[dict[str, object]]:
    """Return the sections of docs/README.md, each with its pages in the order of the links."""
    text = (ROOT / "docs" / INDEX).read_text(encoding="utf-8")
    seen: set[str] = set()
    sections: list[dict[str, object]] = [{"Overview": "index.md"}]
    for section in text.split("\n## ")[1:]:
        title, _, body = section.partition("\n")
        names = [_site_path(name) for name in PAGE_LINK.findall(body)]
        new = [name for name in dict.fromkeys(names) if name not in seen]
        seen.update(new)
        sections.append({title: new})
    return sections


def _copy(path: str, pages: Path) -> None:
    source = ROOT / path
    if path in TOP_PAGES or source.suffix == ".md":
        return
    target = pages / path
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def _within_site(text: str) -> str:
    """Return a page whose links to pages and files of the tree lead to those of the site."""
    text = re.sub(r"\]\(docs/", "](", text)
    text = OUTSIDE.sub(lambda link: f"]({_site_path(link[1])}", text)
    return PAGE_LINK.sub(lambda link: link[0].replace(link[1], _site_path(link[1]), 1), text)


def _site_path(path: str) -> str:
    name = path.removeprefix("../")
    return TOP_PAGES.get(name, _page_name(name))


def _page_name(name: str) -> str:
    return "index.md" if name == INDEX else name


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python -m deploy.site.pages FOLDER\n")
        return 2
    write_site(Path(sys.argv[1]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
