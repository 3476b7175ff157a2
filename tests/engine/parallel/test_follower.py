"""A rank besides the first: its process."""

from __future__ import annotations

import subprocess
import sys

CRASH = """
import os, resource
from engine.parallel.follower import main
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
main()
os.abort()
"""


def test_follower_that_crashes_writes_its_stack() -> None:
    """The input is empty, so `main` returns at once."""
    command = [sys.executable, "-c", CRASH]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert "Fatal Python error: Aborted" in done.stderr
