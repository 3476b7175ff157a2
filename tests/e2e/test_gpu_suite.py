"""`python -m loadtest.gpu --smoke`: the GPU benchmarks run end to end with small sizes on a CPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.gpu.__main__ import facts, run_section
from loadtest.gpu.sections import GROUPS, SECTIONS


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest.gpu", "--smoke", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)


@pytest.mark.slow
def test_section_writes_a_table_and_json(tmp_path: Path) -> None:
    done = run("--sections", "prefill", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["failed"] == {}
    for row in written["rows"]:
        assert row["value"] > 0
        # Each row is printed when it is measured, and again at the end.
        assert done.stdout.count(f"| {row['what']} |") == 2
    assert {"memory read", "8B, prefill of 32"} <= {row["what"] for row in written["rows"]}


@pytest.mark.slow
def test_failing_section_prints_a_line_and_exits_with_1() -> None:
    done = run("--sections", "prefill", "--budget", "0")
    assert done.returncode == 1
    assert "| prefill | FAILED |" in done.stdout
    assert run("--sections", "nonsense").returncode == 2


def test_section_that_hangs_is_stopped_and_becomes_a_line() -> None:
    rows, why = run_section("prefill", ["--smoke"], 0.2)
    assert rows == []
    assert why == "timed out after 0 s"


@pytest.mark.slow
def test_json_holds_what_was_measured_when_the_run_is_stopped(tmp_path: Path) -> None:
    """Killed in its second section, the run has written the first."""
    path = tmp_path / "out.json"
    command = [sys.executable, "-m", "loadtest.gpu", "--smoke", "--json", str(path)]
    with subprocess.Popen([*command, "--sections", "nano"], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline().startswith(b"ceilings: done")
        written = json.loads(path.read_text())
        running.send_signal(signal.SIGINT)  # it stops the section that runs
    assert [row["what"] for row in written["rows"]] == ["memory read", "bf16 matmul"]


def test_groups_hold_every_section_once() -> None:
    assert sorted(name for names in GROUPS.values() for name in names) == sorted(SECTIONS)
    assert sum(SECTIONS[name].seconds for name in GROUPS["check"]) <= 600


def test_facts_without_git_have_an_unknown_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert facts("gpu-check")["commit"] == "unknown"


def test_gpu_wheels_include_penstock() -> None:
    """The server reads its version from package metadata, so it must be installed."""
    root = Path(__file__).parents[2]
    shown = subprocess.run(
        ["make", "-n", "gpu-wheels"], cwd=root, capture_output=True, text=True, check=True
    )
    assert "pip wheel -q --no-deps -w build/gpu-wheels .\n" in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", SECTIONS)
def test_section_with_smoke_sizes_succeeds(name: str) -> None:
    done = run("--sections", name)
    assert done.returncode == 0, done.stderr + done.stdout
