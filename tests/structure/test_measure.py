"""How much a reader has to hold: the closures of the loop and a route, the density of lines."""

from __future__ import annotations

import pytest

from tests.structure.measure import CHAT_ROUTE, ROOT, closure, folder_files, size_of, total
from tests.structure.rooms import branches

LOOP_FILES, LOOP_LINES, LOOP_CLASSES, LOOP_BRANCHES = 38, 3900, 90, 12
CHAT_FILES, CHAT_LINES, CHAT_CLASSES = 70, 6500, 140
TOKENS_PER_LINE = 9.0
ENGINE_ROOT_FILES = 6


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


def test_files_that_the_chat_route_imports_stay_few() -> None:
    """It holds no wing, no parser of answers and no reader of checkpoints."""
    found = closure(CHAT_ROUTE, apart=())
    assert len(found) <= CHAT_FILES
    route = total(found.values())
    assert route.lines <= CHAT_LINES
    assert route.classes <= CHAT_CLASSES
    hidden = ("server.glassbox", "server.replay", "server.batch", "server.grammar")
    assert not [name for name in found if name.startswith(hidden)]
    assert "server.text.parsers.answer_parser" not in found


def test_files_of_the_engine_outside_its_folders_stay_few() -> None:
    """A file has a home in the folder that it works with; the loop and its process have none."""
    assert len(list((ROOT / "engine").glob("*.py"))) <= ENGINE_ROOT_FILES


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
