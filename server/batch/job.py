"""A batch from a file to a file: `penstock run-batch`, without the parts that reach a server."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from engine.checkpoint.folder import full_path
from engine.errors import ConfigError
from server.batch.executor import run_lines
from server.batch.lines import ENDPOINTS, MAX_PROBLEMS, Input, LineProblem, check_input, read_lines
from server.batch.results import Results, ResultsError
from server.sender import Sender

REPORT_S = 10.0  # between two lines of progress where stderr is no terminal
UPDATE_S = 0.5
SHOWN_PROBLEMS = 5


class JobError(Exception):
    """The files cannot be used. The message has one line per problem."""


@dataclass(frozen=True)
class JobFiles:
    """The input of a job, and the files for its answers and its failures."""

    input: Path
    output: Path
    errors: Path


class Job:
    """An open job. It continues what an earlier process left. Raises JobError.

    `max_line_bytes` limits a line of the input.
    """

    def __init__(self, files: JobFiles, max_line_bytes: int) -> None:
        self.files = files
        self._max_line_bytes = max_line_bytes
        self._input = _checked(files, max_line_bytes)
        try:
            self.results = Results(files.output, files.errors)
        except (OSError, ResultsError) as error:
            raise JobError(str(error)) from None
        unknown = self.results.done - self._input.custom_ids
        if unknown:
            self.results.close()
            raise JobError(
                f"{files.output} or {files.errors} has results of another input, such as of "
                f"{min(unknown)!r}: name other files."
            )

    @property
    def total(self) -> int:
        return self._input.total

    @property
    def is_done(self) -> bool:
        return len(self.results.done) == self.total

    @property
    def summary(self) -> str:
        failed = f", {self.results.failed} failed" if self.results.failed else ""
        return f"{len(self.results.done)} of {self.total} lines{failed}"

    async def run(self, sender: Sender, concurrency: int, say: Callable[[str], None]) -> None:
        """Send the lines that have no result yet. Raises ServerAway or OSError."""
        lines = read_lines(self.files.input, self.results.done, self._max_line_bytes)
        progress = asyncio.create_task(self._report(say))
        try:
            await run_lines(lines, self.results, sender, asyncio.Semaphore(concurrency))
        finally:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)

    async def _report(self, say: Callable[[str], None]) -> None:
        """Show the progress on stderr until cancelled."""
        console = Console(stderr=True)
        before, begin = len(self.results.done), time.monotonic()
        reported_at = begin
        with console.status("starting") as status:
            while True:
                await asyncio.sleep(UPDATE_S)
                now = time.monotonic()
                rate = (len(self.results.done) - before) / (now - begin)
                text = f"{self.summary}, {rate:.1f} lines/s"
                status.update(text)
                if not console.is_terminal and now - reported_at >= REPORT_S:
                    reported_at = now
                    say(f"penstock: {text}")

    def close(self) -> None:
        """Wait until the results are on the disk. An empty file of errors is deleted."""
        with contextlib.closing(self.results):
            self.results.sync()
            if not self.results.failed:
                self.files.errors.unlink(missing_ok=True)


def _checked(files: JobFiles, max_line_bytes: int) -> Input:
    try:
        paths = {full_path(path) for path in (files.input, files.output, files.errors)}
    except ConfigError as error:
        raise JobError(str(error)) from None
    if len(paths) < 3:
        raise JobError("INPUT, --output and --errors must be three files.")
    try:
        found = check_input(files.input, ENDPOINTS, max_line_bytes)
    except OSError as error:
        raise JobError(f"{files.input} cannot be read: {error.strerror}.") from None
    if found.problems:
        raise JobError("\n".join(_described(files.input, found.problems)))
    return found


def _described(path: Path, problems: list[LineProblem]) -> Iterator[str]:
    for problem in problems[:SHOWN_PROBLEMS]:
        where = f"{path}, line {problem.line}" if problem.line else str(path)
        yield f"{where}: {problem.message}"
    more = len(problems) - SHOWN_PROBLEMS
    if more > 0:
        at_least = "at least " if len(problems) == MAX_PROBLEMS else ""
        yield f"{path}: {at_least}{more} further problems."
