"""The promise of test_invariance.py with the kernels oneDNN takes on older CPUs than this one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

INVARIANCE = Path(__file__).with_name("test_invariance.py")


@pytest.mark.slow
@pytest.mark.parametrize("instructions", ["AVX2", "AVX512_CORE"])
def test_equal_bits(instructions: str) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", INVARIANCE],
        cwd=INVARIANCE.parents[2],
        env={**environment, "ONEDNN_MAX_CPU_ISA": instructions},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
