"""Rules of this repository that no linter checks."""

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
def test_engine_core_files_name_no_architecture(file: Path) -> None:
    """Code for a model belongs in its file; other differences are data in its AttentionSpec."""
    families = NAMES | {re.sub(r"(?<=..)[\d_]+$", "", name) for name in NAMES}  # T5 stays T5
    words = "|".join(sorted(families, key=len, reverse=True))
    found = re.findall(rf"(?i)(?<![a-z])(?:{words})", file.read_text(encoding="utf-8"))
    assert not found


CODE_FROM_DATA = {
    *("pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"),
    *("eval", "exec", "recv_pyobj", "send_pyobj", "torch.load", "unsafe_load"),
    *("UnsafeLoader", "FullLoader", "allow_pickle", "trust_remote_code"),
}
# A nanochat checkpoint is a pickle. It is inspected first, and only its tensors are loaded.
READS_TENSORS = "engine/offline/nanochat/checkpoint.py"


def names_in(tree: ast.AST) -> set[str]:
    """Return names that are read, imported or used as keywords, with and without their owner."""
    found = set()
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr="eval"):
                pass  # torch's Module.eval, which evaluates no code
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                found |= {name, f"{owner}.{name}"}
            case ast.Attribute(attr=name) | ast.Name(id=name) | ast.keyword(arg=str(name)):
                found.add(name)
            case ast.Import(names=names) | ast.ImportFrom(names=names):
                found |= {part for alias in names for part in alias.name.split(".")}
    return found


@pytest.mark.parametrize("folder", SOURCES)
def test_sources_never_execute_data_as_code(folder: str) -> None:
    for file in sorted((ROOT / folder).rglob("*.py")):
        source, allowed = file.read_text(encoding="utf-8"), set()
        if file == ROOT / READS_TENSORS:
            assert source.count("torch.load(") == source.count("weights_only=True") == 1
            allowed = {"torch.load"}
        found = names_in(ast.parse(source)) & CODE_FROM_DATA
        assert found <= allowed, file


def test_model_files_median_is_at_most_150_lines() -> None:
    modules = {
        ENGINE.parent / f"{module.replace('.', '/')}.py" for _, module, _ in ARCHITECTURES.values()
    }
    lines = [len(file.read_text(encoding="utf-8").splitlines()) for file in modules]
    assert statistics.median(lines) <= 150


@pytest.mark.parametrize("folder", SOURCES)
def test_files_and_functions_stay_within_their_line_limits(folder: str) -> None:
    """A longer file or function must be split. Decorators of a function do not count."""
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
