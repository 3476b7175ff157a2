"""Imports of large libraries."""

from __future__ import annotations

import gc

import pytest

from engine.client.imports import quick_imports


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.unfreeze()
    gc.enable()


def test_quick_imports_collects_nothing_and_freezes_what_was_made():
    before = gc.get_freeze_count()
    with quick_imports():
        assert not gc.isenabled()
        made = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(made)


def test_quick_imports_leaves_a_disabled_collector_disabled():
    gc.disable()
    with quick_imports():
        pass
    assert not gc.isenabled()


def test_quick_imports_after_a_failed_import_collects_again():
    with pytest.raises(ModuleNotFoundError), quick_imports():
        import no_such_module_of_anyone  # noqa: F401
    assert gc.isenabled()
