"""EngineChild: the engine process as seen by its parent, with the sockets to it.

It is separate from the client, which needs an event loop. `penstock serve` starts the engine before
it imports its own modules, so the engine imports torch while the server imports its modules.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from engine.client.channel import ClientEndpoint
from engine.client.module_command import python_module
from engine.config import EngineConfig

# By default torch and oneDNN cache 1024 oneDNN kernels of half a megabyte each. A model's linear
# layers need a few hundred. Without AMX, attention also adds one per length, and rarely reuses it.
PRIMITIVE_CACHES = {"LRU_CACHE_CAPACITY": "512", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "512"}


class EngineProcess:
    """A running `python -m engine.process`; as a context manager, it is killed on exit.

    Create it in the main thread: Linux sends the parent-death signal when the creating thread ends.
    """

    def __init__(self, config: EngineConfig) -> None:
        # Mode 0700. It is also removed when the interpreter exits: a signal may come before
        # `__enter__`.
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-", ignore_cleanup_errors=True)
        address = f"ipc://{self._folder.name}"
        self.endpoint = ClientEndpoint(address)
        # Popen, because the spawn method of multiprocessing would pickle the arguments.
        self.process = subprocess.Popen(
            [*python_module("engine.process"), address],
            stdin=subprocess.PIPE,
            bufsize=0,
            env=_engine_environment(os.environ),
        )
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # already killed, which `wait` reports
            # The pipe stays open: its end of file tells the child that the parent has ended.
            self.process.stdin.write(msgspec.json.encode(config) + b"\n")

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.wait()
        self.close()

    def waited_ns(self) -> int:
        """Return how long the main thread has waited for a core; -1: the system does not count."""
        try:
            return int(Path(f"/proc/{self.process.pid}/schedstat").read_bytes().split()[1])
        except (OSError, IndexError, ValueError):
            return -1

    def wait(self) -> int:
        """Wait until the process ends; return its exit status."""
        with self.process:  # closes the pipe only after the end: closing it would end the process
            return self.process.wait()

    def close(self) -> None:
        """Close the sockets of a process that has ended. Idempotent."""
        self.endpoint.close()
        self._folder.cleanup()


def exit_message(code: int) -> str:
    """Describe the exit status of an engine that reported no cause."""
    if code >= 0:
        return f"The engine process exited with status {code}."
    likely = ", likely out of memory; lower --max-model-len or --kv-cache-memory-bytes"
    return f"The engine process was killed by signal {-code}{likely if code == -9 else ''}."


def _engine_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with our defaults for the variables that it does not set.

    Malloc may request huge pages from Linux, because every step reads all weights. C libraries
    other than glibc ignore this. `GLIBC_TUNABLES=glibc.malloc.hugetlb=0 make bench` shows the gain.
    """
    tunables = environment.get("GLIBC_TUNABLES", "")
    if "glibc.malloc.hugetlb" not in tunables:
        tunables = ":".join(filter(None, [tunables, "glibc.malloc.hugetlb=1"]))
    return {**PRIMITIVE_CACHES, **environment, "GLIBC_TUNABLES": tunables}
