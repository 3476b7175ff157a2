"""The order of the test files, the file of their durations, and the labels of the tests."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.durations import TestTimes, longest_first, read_durations, write_durations
from tests.support.labels import LABELS, label_of, label_of_module


def test_longest_files_come_first_and_their_tests_stay_in_order() -> None:
    nodes = ["a.py::1", "b.py::1", "b.py::2", "new.py::1", "c.py::1", "c.py::2"]
    items: list[Any] = [SimpleNamespace(nodeid=node) for node in nodes]
    longest_first(items, {"a.py": 0.1, "b.py": 30.0, "c.py": 30.0})
    found = [item.nodeid for item in items]
    assert found == ["b.py::1", "b.py::2", "c.py::1", "c.py::2", "new.py::1", "a.py::1"]


def test_durations_of_a_run_replace_those_of_its_files(tmp_path: Path) -> None:
    file = tmp_path / "durations.json"
    kept, measured = "tests/structure/test_rules.py", "tests/structure/test_durations.py"
    file.write_text(json.dumps({kept: 3.0, measured: 9.0, "tests/test_deleted.py": 1.0}))
    write_durations({measured: 1.26}, file)
    assert read_durations(file) == {kept: 3.0, measured: 1.3}
    assert read_durations(tmp_path / "absent.json") == {}


@pytest.mark.parametrize(
    ("nodeid", "imported", "label"),
    [
        ("tests/server/text/test_a.py::f", {}, "unit"),
        ("tests/engine/ops/test_a.py::f", {}, "engine"),
        ("tests/engine/scheduling/test_a.py::f", {}, "unit"),
        ("tests/e2e/test_a.py::f", {}, "process"),
        ("tests/server/cli/test_a.py::f", {"subprocess": subprocess}, "process"),
        ("tests/server/cli/test_a.py::f", {"run": subprocess.run}, "process"),
        ("tests/engine/ops/test_a.py::f", {"subprocess": subprocess}, "process"),
        ("tests/server/text/test_a.py::f", {"torch": ModuleType("torch")}, "engine"),
    ],
)
def test_label_follows_the_folder_and_the_imports(
    nodeid: str, imported: dict[str, Any], label: str
) -> None:
    module = ModuleType("test_module")
    vars(module).update(imported)
    assert label_of_module(nodeid, module) == label


def test_this_test_is_labelled(request: pytest.FixtureRequest) -> None:
    assert label_of(request.node) == "process"
    assert request.node.get_closest_marker("process")


def test_end_of_a_run_has_a_line_for_each_label(capsys: pytest.CaptureFixture[str]) -> None:
    times = TestTimes(writes_file=False)
    for label, when in (("unit", "setup"), ("unit", "call"), ("engine", "call")):
        report: Any = SimpleNamespace(
            nodeid="a.py::f", label=label, when=when, duration=1.5, cpu_seconds=0.25
        )
        times.pytest_runtest_logreport(report)
    terminal: Any = SimpleNamespace(section=print, line=print)
    times.pytest_terminal_summary(terminal)
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split(":")[0].split() for line in lines] == [
        ["unit", "1", "tests", "3.0", "s,", "0.5", "s", "of", "CPU"],
        ["engine", "1", "tests", "1.5", "s,", "0.2", "s", "of", "CPU"],
        ["process", "0", "tests", "0.0", "s,", "0.0", "s", "of", "CPU"],
    ]
    assert len(lines) == len(LABELS)
