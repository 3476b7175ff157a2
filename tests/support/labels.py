"""Markers for what a test needs: `pytest -m unit` runs the tests without torch and processes.

The folder of a test gives its label, or what its module imports.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import pytest

LABELS = {
    "unit": "no torch, and no other program than the renderer of chat templates",
    "engine": "torch in the test's own process",
    "process": "servers or other programs as processes",
}
FOLDERS = {
    "tests/e2e/": "process",
    "tests/faults/": "process",
    "tests/clients/": "process",
    "tests/ui/": "process",
    "tests/gpu/": "engine",
    "tests/engine/client/": "unit",
    "tests/engine/protocol/": "unit",
    "tests/engine/scheduling/": "unit",
    "tests/engine/": "engine",
}
# A test module that imports one of these, or a name of one, has the label in any folder.
IMPORTS = {
    "process": {"subprocess", "tests.support.process", "tests.support.serve", "server.images.pool"},
    "engine": {"torch"},
}


def label_of(item: pytest.Item) -> str:
    """Return the label of a test: a key of LABELS."""
    module = item.module if isinstance(item, pytest.Function) else ModuleType("none")
    return label_of_module(item.nodeid, module)


def label_of_module(nodeid: str, module: ModuleType) -> str:
    """Return the label of a test with this id, whose module is given."""
    imported = _imported(module)
    for label, modules in IMPORTS.items():
        if imported & modules:
            return label
    return next((FOLDERS[name] for name in FOLDERS if nodeid.startswith(name)), "unit")


@cache
def _imported(module: ModuleType) -> set[str]:
    """Return the modules that a test module imports, and the modules of the names it imports."""
    values = list(vars(module).values())
    modules = {value.__name__ for value in values if isinstance(value, ModuleType)}
    return modules | {str(getattr(value, "__module__", "")) for value in values}
