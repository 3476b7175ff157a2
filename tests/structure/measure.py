"""Measure how much a reader has to hold: `python -m tests.structure.measure`.

Code lines are lines with code: without blank lines, comments and docstrings. Tokens are Python's
own, without comments, docstrings, line ends and indentation.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# The loop's closure leaves these out: they are read one file at a time.
APART = (
    "engine.models",
    "engine.layers",
    "engine.ops",
    "engine.kernels",
    "engine.checkpoint.loader",
    "engine.checkpoint.weight_map",
    "engine.checkpoint.random",
)
CHAT_ROUTE = "server.api.openai.chat"
LAYOUT = {
    tokenize.ENCODING,
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Size:
    """Of one file or several: lines with code, the tokens on them, classes."""

    lines: int = 0
    tokens: int = 0
    classes: int = 0

    def __add__(self, other: Size) -> Size:
        return Size(
            self.lines + other.lines, self.tokens + other.tokens, self.classes + other.classes
        )

    @property
    def density(self) -> float:
        """Tokens on an average line."""
        return self.tokens / self.lines


def size_of(source: str) -> Size:
    """The size of one file's source text."""
    tree = ast.parse(source)
    docstring_lines = set()
    for node in ast.walk(tree):
        docstring = _docstring(node)
        if docstring is not None:
            docstring_lines.update(range(docstring.lineno, (docstring.end_lineno or 0) + 1))
    lines = set()
    tokens = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in LAYOUT or token.start[0] in docstring_lines:
            continue
        tokens += 1
        lines.update(range(token.start[0], token.end[0] + 1))
    classes = sum(isinstance(node, ast.ClassDef) for node in ast.walk(tree))
    return Size(len(lines), tokens, classes)


def _docstring(node: ast.AST) -> ast.Expr | None:
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    if not isinstance(node, documented) or not node.body:
        return None
    first = node.body[0]
    if not isinstance(first, ast.Expr) or not isinstance(first.value, ast.Constant):
        return None
    return first if isinstance(first.value.value, str) else None


def total(files: Iterable[Path]) -> Size:
    """The size of several files."""
    return sum((size_of(file.read_text(encoding="utf-8")) for file in files), Size())


def folder_files(folder: str) -> list[Path]:
    """Every Python file below a folder of the repository."""
    return sorted((ROOT / folder).rglob("*.py"))


def closure(module: str, apart: tuple[str, ...] = APART) -> dict[str, Path]:
    """The modules of this project that importing `module` needs, without those below `apart`."""
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = _file_of(name)
        if name in found or file is None or name.startswith(apart):
            continue
        found[name] = file
        waiting += imports(file)
    return found


def _file_of(module: str) -> Path | None:
    path = ROOT.joinpath(*module.split("."))
    for candidate in (path.with_suffix(".py"), path / "__init__.py"):
        if candidate.is_file():
            return candidate
    return None


def imports(file: Path, packages: tuple[str, ...] = ("engine", "server")) -> list[str]:
    """The modules and names of these packages that a file imports, also inside functions."""
    return imports_of(file.read_text(encoding="utf-8"), packages)


def imports_of(source: str, packages: tuple[str, ...] = ("engine", "server")) -> list[str]:
    """The same for the source text of a file."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.append(node.module)
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return [name for name in names if name.split(".")[0] in packages]


def main() -> None:
    from tests.structure import rooms  # it needs this module

    for module, apart in (("engine.core", APART), (CHAT_ROUTE, ())):
        files = closure(module, apart)
        size = total(files.values())
        print(
            f"closure of {module}: {len(files)} files, {size.lines} lines, {size.classes} classes"
        )
    loop = closure("engine.core").values()
    most = max((count, name) for file in loop for name, count in rooms.branches(file).items())
    print(f"most branches of a function of the loop: {most[0]} ({most[1]})")
    for folder in ("engine", "server"):
        graph = rooms.arrows(folder)
        count = sum(map(len, graph.values()))
        print(f"{folder}: {len(graph)} rooms, {count} arrows between them")
        print(f"  rooms that import each other: {rooms.mutual_pairs(graph)}")
        print(f"  knots: {rooms.knots(graph)}")
        print(f"  files outside folders: {len(list((ROOT / folder).glob('*.py')))}")
    for folder in ("engine", "server", "loadtest"):
        size = total(folder_files(folder))
        print(f"{folder}: {size.lines} lines of code, {size.density:.2f} tokens a line")
    pyproject = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    print(f"pyproject.toml: {len(pyproject.splitlines())} lines")


if __name__ == "__main__":
    main()
