"""Processes that compile kernels ahead, on several cores at once.

The process of the engine then needs no Numba, whose compiler would keep more than 100 MB.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path

from engine.client.module_command import python_module

Kernel = tuple[str | int, ...]  # "module.function" of `source/`, and the shape

MODULE = "engine.kernels.numba.compile_process"
READY = "ready"  # the first line of a process that has imported Numba
POLL_S = 0.02


class Compilers:
    """The processes that compile into one folder. They end with their list, or with this object."""

    def __init__(self, folder: Path) -> None:
        self.kernels: frozenset[Kernel] = frozenset()  # those that they were given
        self._folder = folder
        self._processes: list[subprocess.Popen[str]] = []
        weakref.finalize(self, _end, self._processes)

    def check(self) -> None:
        """Raises ImportError with the reason if Numba cannot be imported."""
        self._start_processes(1)
        stdout = self._processes[0].stdout
        assert stdout is not None
        if (line := stdout.readline().strip()) != READY:
            raise ImportError(line or "the process that imports Numba ended")

    def compile(self, kernels: Sequence[Kernel], count: int) -> None:
        """Let `count` processes compile these kernels, the first ones first."""
        self.kernels = frozenset(kernels)
        self._start_processes(count)
        for process in self._processes:
            assert process.stdin is not None
            try:
                process.stdin.write(json.dumps(kernels) + "\n")
                process.stdin.close()
            except OSError:  # it has ended; the kernels that are missing are compiled here
                continue
        # Also if no kernel is waited for: a process that ended must not stay as a zombie.
        threading.Thread(target=_collect, args=(tuple(self._processes),), daemon=True).start()

    def wait(self) -> bool:
        """Wait a moment; return False if all processes have ended."""
        is_running = [process.poll() is None for process in self._processes]
        if any(is_running):
            time.sleep(POLL_S)
        return any(is_running)

    def _start_processes(self, count: int) -> None:
        for _ in range(count - len(self._processes)):
            process = subprocess.Popen(
                [*python_module(MODULE), str(self._folder)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # an error is met, and reported, by who needs the kernel
                text=True,
            )
            self._processes.append(process)


def _collect(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.wait()


def _end(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        process.kill()
        with process:  # closes its pipes and waits
            pass
