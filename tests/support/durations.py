"""How long each test takes: what tests/durations.json holds, and the times after a run.

`make durations` runs all tests of `make test` and writes the file. It has the seconds of each test
file. The longest files run first, so that the workers of pytest-xdist end together, and
`make check` chooses tests by it.
"""

from __future__ import annotations

import json
import resource
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.labels import LABELS, label_of

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "durations.json"
NEW_FILE_S = 1.0  # of a file that has not been measured


def read_durations(file: Path = FILE) -> dict[str, float]:
    """Return the seconds of each measured test file; the keys are paths from the root."""
    return json.loads(file.read_text()) if file.exists() else {}


def write_durations(seconds: Mapping[str, float], file: Path = FILE) -> None:
    """Write these seconds, and keep those of other test files that still exist."""
    kept = {name: value for name, value in read_durations(file).items() if (ROOT / name).exists()}
    merged = kept | {name: round(value, 1) for name, value in seconds.items()}
    file.write_text(json.dumps(merged, indent=0, sort_keys=True) + "\n")


def longest_first(items: list[pytest.Item], seconds: Mapping[str, float]) -> None:
    """Sort tests by the duration of their file. The tests of a file stay together, in order."""
    items.sort(key=lambda item: -seconds.get(file_of(item.nodeid), NEW_FILE_S))


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def _cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those of its children that have ended."""
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


class TestTimes:
    """A plugin that adds up the seconds of the tests by label and by file.

    A worker of xdist sends its reports, with the CPU seconds, to the process that prints.
    """

    __test__ = False

    def __init__(self, writes_file: bool) -> None:
        self.writes_file = writes_file
        self.tests: Counter[str] = Counter()  # by label
        self.seconds: Counter[str] = Counter()  # by label
        self.cpu_seconds: Counter[str] = Counter()  # by label
        self.of_files: Counter[str] = Counter()
        self._cpu_before = _cpu_seconds()

    def pytest_runtest_logstart(self) -> None:
        self._cpu_before = _cpu_seconds()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        report = yield
        now = _cpu_seconds()
        report.label, report.cpu_seconds = label_of(item), now - self._cpu_before
        self._cpu_before = now
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.of_files[file_of(report.nodeid)] += report.duration
        if label := getattr(report, "label", None):  # the report of a crash has none
            self.tests[label] += report.when == "call"
            self.seconds[label] += report.duration
            self.cpu_seconds[label] += report.cpu_seconds

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section("time of the tests by what they need")
        for label, needs in LABELS.items():
            terminalreporter.line(
                f"{label:8} {self.tests[label]:6,} tests {self.seconds[label]:7.1f} s, "
                f"{self.cpu_seconds[label]:7.1f} s of CPU: {needs}"
            )
        if self.writes_file:
            write_durations(self.of_files)
