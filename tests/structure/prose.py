"""Find words and sentence shapes that our prose avoids.

Run it with `python -m tests.structure.prose [PATH ...]`.

Prose is every comment, docstring, message and page of documentation, and the names of tests.
`--long` also lists sentences of more than 30 words.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("engine", "server", "loadtest", "deploy", "tests", "docs")
AVOIDED = (
    "whoever",
    "whom",
    "nobody",
    "whatever",
    "of which",
    "so many",
    "told",
    "asked",
    "anew",
    "alike",
    "beside",
    "as far as",
    "in vain",
)
WORD = re.compile(rf"\b(?:{'|'.join(AVOIDED)})\b".replace(" ", r"\s+"), re.IGNORECASE)
# A sentence that begins like a question and ends like none.
NO_QUESTION = re.compile(r"(?:^|(?<=[.!?]\s))(?:Who|What)\b[^.?!]*(?:[.!]|$)")
QUESTION_WORD = re.compile(r"\b(?:Who|What)\b")
SENTENCE_END = re.compile(r"(?<=[.!?:;])\s+|\n\s*\n")
LONG = 30  # words
# What the demo models were taught is their material, not our prose.
MATERIAL = re.compile(
    r"engine/(?:demo|offline/demo_training)/.*(?:text|topics|lexicon|translation|material)\.(?:py|toml)"
)
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
SELF = ("tests/structure/prose.py", "tests/structure/test_prose.py")

Place = tuple[int, str]  # line, text


def python_prose(source: str, *, messages: bool) -> Iterator[Place]:
    """Comments, docstrings and names of tests; with `messages` every text with a space in it."""
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(id(node.value))
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_function and node.name.startswith("test_"):
            yield node.lineno, node.name.replace("_", " ")
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_prose = id(node) in docstrings or (messages and " " in node.value)
            if is_prose:
                yield node.lineno, node.value
    yield from comments(source)


def comments(source: str) -> Iterator[Place]:
    """Each block of comment lines as one text."""
    block: list[str] = []
    start = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and line != last + 1:
            yield start, "\n".join(block)
            block = []
        start = start if block else line
        block.append(token.string.lstrip("# "))
        last = line
    if block:
        yield start, "\n".join(block)


def hash_comments(source: str) -> Iterator[Place]:
    """Comments of YAML, TOML, Makefiles and Dockerfiles."""
    for number, line in enumerate(source.splitlines(), 1):
        if found := re.search(r"(?:^|\s)#\s?(.*)", line):
            yield number, found[1]


def markdown(source: str) -> Iterator[Place]:
    """A page's paragraphs, without its code."""
    blanked = FENCED.sub(lambda code: "\n" * code[0].count("\n"), source)
    yield from enumerate(blanked.splitlines(), 1)


def prose_of(file: Path) -> Iterable[Place]:
    name = file.relative_to(ROOT).as_posix()
    source = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        product = not name.startswith("tests/") and not MATERIAL.fullmatch(name)
        return python_prose(source, messages=product)
    if file.suffix == ".md":
        return markdown(source)
    return hash_comments(source)


def files_of(paths: Iterable[Path]) -> Iterator[Path]:
    """The files with prose in and below these paths."""
    suffixes = {".py", ".md", ".yaml", ".yml", ".toml"}
    for path in paths:
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        for file in found:
            named = file.suffix in suffixes or file.name in ("Makefile", "Dockerfile")
            name = file.relative_to(ROOT).as_posix()
            is_material = file.suffix == ".toml" and MATERIAL.fullmatch(name)
            if file.is_file() and named and name not in SELF and not is_material:
                yield file


def everything() -> list[Path]:
    """Every file of the repository whose prose is held to the list."""
    top = [*ROOT.glob("*.md"), ROOT / "Makefile", ROOT / "pyproject.toml"]
    return list(files_of([*top, *(ROOT / folder for folder in FOLDERS)]))


def folder_of(file: Path) -> str:
    """The first folder of a file's path in the repository, "." for a file at the top."""
    parts = file.relative_to(ROOT).parts
    return parts[0] if len(parts) > 1 else "."


def violations(file: Path) -> Iterator[str]:
    """Yield `file:line: finding` for each avoided word, and for each question that is none."""
    # To parse a file takes long. Most have none of the words, also not in a name or over lines.
    words = re.sub(r"[\s_#]+", " ", file.read_text(encoding="utf-8"))
    if not WORD.search(words) and not QUESTION_WORD.search(words):
        return
    for line, text in prose_of(file):
        yield from found_in(file, line, text)


def found_in(file: Path, line: int, text: str) -> Iterator[str]:
    """Yield the findings of one text, which begins at `line` of `file`."""
    name = file.relative_to(ROOT)
    for found in WORD.finditer(text):
        yield f"{name}:{line + text[: found.start()].count(chr(10))}: {found[0]!r}"
    flat = re.sub(r"\s+", " ", text).strip()
    for found in NO_QUESTION.finditer(flat):
        yield f"{name}:{line}: begins with a question word: {found[0][:60]!r}"


def long_sentences(file: Path) -> Iterator[str]:
    name = file.relative_to(ROOT)
    for line, text in prose_of(file):
        for sentence in SENTENCE_END.split(text):
            if len(sentence.split()) > LONG:
                yield f"{name}:{line}: {len(sentence.split())} words: {sentence.strip()[:70]!r}"


def main() -> int:
    arguments = sys.argv[1:]
    paths = [Path(a).resolve() for a in arguments if not a.startswith("-")]
    files = list(files_of(paths)) if paths else everything()
    found = [text for file in files for text in violations(file)]
    if "--long" in arguments:
        found += [text for file in files for text in long_sentences(file)]
    print("\n".join(found))
    print(f"{len(found)} found in {len(files)} files")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
