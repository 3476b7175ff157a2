"""The prose of comments, docstrings, messages, test names and documents avoids certain words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.structure import prose
from tests.support.wings import is_of_absent_wing

README_WORDS, PAGE_WORDS = 900, 2000


@pytest.mark.parametrize("folder", [*prose.FOLDERS, "."])
def test_prose_of_folder_has_no_avoided_word(folder: str) -> None:
    files = [file for file in prose.everything() if prose.folder_of(file) == folder]
    assert files
    assert [found for file in files for found in prose.violations(file)] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Nobody is told", 2),
        ("as\nfar as the last of  which", 2),
        ("What is left. What is left?", 1),
        ("Besides, a task is asked-for", 1),
        ("The tokens of a request.", 0),
    ],
)
def test_violations_of_comment_are_counted(tmp_path: Path, text: str, found: int) -> None:
    file = prose.ROOT / "engine" / "__init__.py"
    source = "".join(f"# {line}\n" for line in text.splitlines())
    places = list(prose.python_prose(source, messages=True))
    assert sum(len(list(prose.found_in(file, *place))) for place in places) == found


def test_readme_and_pages_have_at_most_their_words() -> None:
    lengths = {page: len(page.read_text(encoding="utf-8").split()) for page in documents()}
    assert lengths.pop(prose.ROOT / "README.md") <= README_WORDS
    assert {page.name: words for page, words in lengths.items() if words > PAGE_WORDS} == {}


def documents() -> list[Path]:
    return [prose.ROOT / "README.md", *(prose.ROOT / "docs").glob("*.md")]


def test_files_that_documents_name_exist() -> None:
    """A path in backticks is one of this tree. A name in capitals stands for the reader's own."""
    for page in [*documents(), prose.ROOT / "CONTRIBUTING.md"]:
        text = page.read_text(encoding="utf-8")
        named = re.findall(rf"`((?:{'|'.join(prose.FOLDERS)})/[\w./-]*)`", text)
        missing = [path for path in named if not (prose.ROOT / path).exists()]
        missing = [path for path in missing if not is_of_absent_wing(path)]
        assert [path for path in missing if not re.search(r"/[A-Z]+[.]", path)] == [], page.name
