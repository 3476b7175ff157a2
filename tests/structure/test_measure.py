"""How much a reader has to hold: the engine loop's closure, and the density of lines."""

from __future__ import annotations

import pytest

from tests.structure.measure import closure, folder_files, size_of, total
from tests.structure.rooms import branches

LOOP_FILES, LOOP_LINES, LOOP_CLASSES, LOOP_BRANCHES = 38, 3900, 90, 12
TOKENS_PER_LINE = 9.0


def test_files_that_the_engine_loop_imports_stay_few() -> None:
    files = closure("engine.core").values()
    assert len(files) <= LOOP_FILES
    loop = total(files)
    assert loop.lines <= LOOP_LINES
    assert loop.classes <= LOOP_CLASSES


def test_functions_of_the_engine_loop_branch_little() -> None:
    for file in closure("engine.core").values():
        for name, count in branches(file).items():
            assert count <= LOOP_BRANCHES, f"{name} in {file}"


@pytest.mark.parametrize("folder", ["engine", "server"])
def test_lines_of_code_are_not_packed(folder: str) -> None:
    """A folder above the limit has expressions to unfold: give their parts names."""
    assert total(folder_files(folder)).density <= TOKENS_PER_LINE


def test_closure_follows_imports_into_functions_and_leaves_models_out() -> None:
    found = closure("engine.core")
    assert {"engine.core", "engine.runner.model_runner", "engine.protocol.generate"} <= found.keys()
    assert not [name for name in found if name.startswith(("engine.models", "torch"))]


def test_size_counts_code_lines_tokens_and_classes_only() -> None:
    source = (
        '"""A module."""\n\n# A comment.\nclass A:\n    """Its docstring."""\n\n    x = 1  # one\n'
    )
    size = size_of(source)
    assert (size.lines, size.tokens, size.classes) == (2, 6, 1)
