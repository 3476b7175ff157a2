"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import re
import statistics
from pathlib import Path

import pytest

from engine.models.registry import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
ENGINE = ROOT / "engine"
FILES = [ENGINE / "core.py", *ENGINE.glob("runner/*.py"), *ENGINE.glob("scheduling/*.py")]
SOURCES = ("engine", "server", "loadtest", "deploy")
FILE_LINES, FUNCTION_LINES = 400, 60
NAMES = {module.rpartition(".")[2] for _, module, _ in ARCHITECTURES.values()}


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_the_engine_names_no_architecture(file: Path) -> None:
    """What is special about a model is in its file, or data in its AttentionSpec."""
    families = NAMES | {re.sub(r"(?<=..)[\d_]+$", "", name) for name in NAMES}  # but T5 is no t
    words = "|".join(sorted(families, key=len, reverse=True))
    found = re.findall(rf"(?i)(?<![a-z])(?:{words})", file.read_text(encoding="utf-8"))
    assert not found


CODE_FROM_DATA = {
    *("pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"),
    *("eval", "exec", "recv_pyobj", "send_pyobj", "torch.load", "unsafe_load"),
    *("UnsafeLoader", "FullLoader", "allow_pickle", "trust_remote_code"),
}
# A checkpoint of nanochat is such a file: it is looked through first, and tensors alone are read.
READS_TENSORS = "engine/weights/nanochat/checkpoint.py"


def names_in(tree: ast.AST) -> set[str]:
    """Names that are read, imported or given as keywords, each alone and with what it is of."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="eval"):
                pass  # torch's, which is no evaluation of a text
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                found |= {name, f"{owner}.{name}"}
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {part for alias in names for part in alias.name.split(".")}
    return found


@pytest.mark.parametrize("folder", SOURCES)
def test_nothing_makes_code_of_data(folder: str) -> None:
    for file in sorted((ROOT / folder).rglob("*.py")):
        source, allowed = file.read_text(encoding="utf-8"), set()
        if file == ROOT / READS_TENSORS:
            assert source.count("torch.load(") == source.count("weights_only=True") == 1
            allowed = {"torch.load"}
        found = names_in(ast.parse(source)) & CODE_FROM_DATA
        assert found <= allowed, file


def test_model_files_are_short() -> None:
    modules = {
        ENGINE.parent / f"{module.replace('.', '/')}.py" for _, module, _ in ARCHITECTURES.values()
    }
    lines = [len(file.read_text(encoding="utf-8").splitlines()) for file in modules]
    assert statistics.median(lines) <= 150


@pytest.mark.parametrize("folder", SOURCES)
def test_files_and_functions_are_short(folder: str) -> None:
    """What is longer is split by noun; of a function decorators do not count."""
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    long = [found for file in files for found in too_long(file)]
    assert not long


def too_long(file: Path) -> list[str]:
    text = file.read_text(encoding="utf-8")
    name = file.relative_to(ROOT)
    lines = len(text.splitlines())
    found = [f"{name}: {lines} lines"] if lines > FILE_LINES else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > FUNCTION_LINES:
                found.append(f"{name}:{node.lineno} {node.name}: {lines} lines")
    return found
