"""Run test_invariance.py as on other CPUs: with older instruction sets and with more threads."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INVARIANCE = Path(__file__).with_name("test_invariance.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [
        {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
        {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
        {"TEST_THREADS": "2"},
        {"TEST_THREADS": "7"},
    ],
    ids=lambda setting: "-".join(setting.values()),
)
def test_invariance_with_other_isa_or_threads_passes(setting: dict[str, str]) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", INVARIANCE],
        cwd=INVARIANCE.parents[3],
        env=environment | setting,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
