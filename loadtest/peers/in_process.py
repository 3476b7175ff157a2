"""Contenders without an HTTP server: a worker runs the library in the library's environment."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch

from loadtest.peers.figures import Figures, Measure, figures, resident_mb
from loadtest.peers.jobs import JOB_S, Job, Room, Words
from loadtest.peers.worker import Setup, Times, WorkerJob
from loadtest.servers import START_S

ROOT = Path(__file__).resolve().parents[2]


class Worker:
    """A library that runs in its own environment: the module `script` gets jobs on its stdin.

    With `words`, its prompts are texts of the same token ids.
    """

    http = False
    sized = False

    def __init__(self, python: Path, script: str, model: Path, words: Words | None = None) -> None:
        self._command = [str(python), "-m", f"loadtest.peers.{script}"]
        self._model, self._words = model, words

    @contextmanager
    def running(self, room: Room) -> Iterator[Measure]:
        """Load the model in a fresh process. Raises RuntimeError with the reason if it fails."""
        began = time.monotonic()
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            process = Process(self._command, log)
            try:
                process.ask(asdict(Setup(str(self._model), room.streams)), START_S)
                start = time.monotonic() - began
                yield lambda job: self._measure(process, job)._replace(start=start)
            finally:
                process.stop()

    def _measure(self, process: Process, job: Job) -> Figures:
        process.ask(self._message(job.warm_up), JOB_S)
        resident = resident_mb(process.pid)
        times = Times(**process.ask(self._message(job), JOB_S))
        return figures(times, job)._replace(resident=resident)

    def _message(self, job: Job) -> dict[str, Any]:
        prompts: list[Any] = list(job.prompts)
        if self._words is not None:
            prompts = [self._words.text(prompt) for prompt in job.prompts]
        return asdict(WorkerJob(prompts, job.new, job.streams, list(job.arrivals)))


class Process:
    """A process that answers each line of JSON with one. Its stderr goes to the file `log`."""

    def __init__(self, command: list[str], log: IO[str]) -> None:
        self._log = log
        threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | threads | {"PYTHONPATH": str(ROOT)},
        )
        self.pid = self._process.pid

    def ask(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Return the answer to a message. Raises RuntimeError if it ends or takes too long."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self._process.kill()

        timer = threading.Timer(limit_s, end)
        timer.start()
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        finally:
            timer.cancel()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        if late.is_set():
            raise RuntimeError(f"it took longer than {limit_s:g} s")
        self._log.seek(0)
        raise RuntimeError(" ".join(self._log.read().split())[-300:] or "it ended without a reason")

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()
