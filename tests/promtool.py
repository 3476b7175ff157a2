"""Prometheus' own checker, where it is installed."""

from __future__ import annotations

import shutil
import subprocess

import pytest


def promtool(*arguments: object, stdin: str = "") -> tuple[int, str]:
    """Exit status and output; skips the test where there is no promtool."""
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("needs promtool (Debian's package prometheus)")
    command = [path, *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr
