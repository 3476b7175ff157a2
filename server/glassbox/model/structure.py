"""StructureReader: finds the structure of the served model, once."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import msgspec

from engine.client.module_command import python_module
from engine.protocol.structure import ModelStructure


class StructureError(Exception):
    """The structure could not be found; the text says why."""


class StructureReader:
    """Runs `engine.offline.structure_command` at the first request for the structure.

    Later callers get the same answer. After a failure the next caller tries again.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = asyncio.Lock()
        self._found: ModelStructure | None = None
        self._process: asyncio.subprocess.Process | None = None

    async def read(self, max_positions: int, dtype: str, *, drafts_by_head: bool) -> ModelStructure:
        """Return the structure. Takes seconds the first time. Raises StructureError."""
        drafts = ["mtp"] if drafts_by_head else []
        async with self._lock:
            if self._found is None:
                self._found = await self._run(str(max_positions), dtype, *drafts)
        return self._found

    async def _run(self, *arguments: str) -> ModelStructure:
        command = [*python_module("engine.offline.structure_command"), str(self._folder)]
        pipe = asyncio.subprocess.PIPE
        # Neither a GPU nor many threads: the process computes only shapes.
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command, *arguments, stdout=pipe, stderr=pipe, env=environment
            )
        except OSError as error:
            raise StructureError(f"Cannot start a process: {error.strerror}.") from None
        try:
            output, errors = await self._process.communicate()
        finally:
            self.close()  # the client went away, and with it this task
        if self._process.returncode:
            lines = errors.decode(errors="replace").splitlines()
            raise StructureError(lines[-1] if lines else "The process was killed.")
        return msgspec.json.decode(output, type=ModelStructure)

    def close(self) -> None:
        """Kill the process if it runs."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
