"""EngineChild: the engine's process as its parent holds it, and the sockets to it.

Apart from the client, which belongs to an event loop: `penstock serve` begins the engine before it
imports its own modules, so that torch and they are imported at the same time.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine.channel import ClientEndpoint
from engine.config import EngineConfig

# Of oneDNN's kernels, half a megabyte each, torch and oneDNN keep 1024 by default. A model's
# linears need a few hundred; without AMX attention has one for each length, too, seldom used again.
KERNELS_KEPT = {"LRU_CACHE_CAPACITY": "512", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512"}


class EngineChild:
    """A running `python -m engine.process`; as a context manager, it ends with the block.

    To be made by the main thread: Linux ties a child's parent-death signal to the thread.
    """

    def __init__(self, config: EngineConfig) -> None:
        # Mode 0700. A signal may come before `__enter__`: it goes at the interpreter's exit, too.
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True)
        address = f"ipc://{self._folder.name}"
        self.endpoint = ClientEndpoint(address)
        # Popen, not multiprocessing: its spawn would pickle the arguments.
        self.process = subprocess.Popen(
            [*python_module("engine.process"), address],
            stdin=subprocess.PIPE,
            bufsize=0,
            env=_engine_environment(os.environ),
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # killed already: `wait` tells of it
            # Stays open: its end of file tells the child we are gone.
            self.process.stdin.write(msgspec.json.encode(config) + b"\n")

    def __enter__(self) -> EngineChild:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.wait()
        self.close()

    def wait(self) -> int:
        """Waits for its end; returns the exit status."""
        with self.process:  # closes the pipe, but only once it has ended: that would end it
            return self.process.wait()

    def close(self) -> None:
        """Of a process that has ended. Idempotent."""
        self.endpoint.close()
        self._folder.cleanup()


def python_module(name: str) -> list[str]:
    """The command that runs a module of ours. Without -P Python looks for it, and for all that it
    imports, in the current folder first: a random.py there would be run. Where that folder is our
    source tree, which need not be installed, it may."""
    at_home = False
    with contextlib.suppress(OSError):  # a folder that is closed to this user, or gone
        at_home = Path(__file__).parents[1].samefile(os.curdir)
    return [sys.executable, *([] if at_home else ["-P"]), "-m", name]


def how_it_ended(code: int) -> str:
    """The exit status of an engine that told no cause, in words."""
    if code >= 0:
        return f"The engine process exited with status {code}."
    likely = ", likely out of memory; lower --max-model-len or --kv-cache-memory-bytes"
    return f"The engine process was killed by signal {-code}{likely if code == -9 else ''}."


def _engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """What is set already stays as it is.

    Malloc may ask Linux for huge pages, as every step reads all weights. Another C library ignores
    it; `GLIBC_TUNABLES=glibc.malloc.hugetlb=0 make bench` shows what it is worth.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        tunables = ":".join(filter(None, [tunables, "glibc.malloc.hugetlb=1"]))
    return {**KERNELS_KEPT, **environment, "GLIBC_TUNABLES": tunables}
