"""Imported modules are excluded from Python's garbage collection, whose scans stop the process."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.support.serve import serving

MODULES = 50_000  # objects; torch's modules have about 150,000, the server's 80,000
TELL = """
import atexit, gc, os, pathlib

def tell():
    file = pathlib.Path(__file__).with_name(str(os.getpid()))
    file.write_text(str(gc.get_freeze_count()))

atexit.register(tell)
"""


@pytest.mark.slow
@pytest.mark.parametrize("which", ["server", "engine"])
def test_process_after_start_has_frozen_its_modules(which: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(TELL)
    with serving("demo", env={"PYTHONPATH": str(tmp_path)}) as server:
        server.wait_for("try  ")
        pid = server.engine.pid if which == "engine" else server.process.pid
        server.signal(signal.SIGTERM)
        assert server.status() == 0
    assert int((tmp_path / str(pid)).read_text()) > MODULES
