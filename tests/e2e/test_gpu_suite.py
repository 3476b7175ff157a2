"""`python -m loadtest.gpu --smoke`: the GPU benchmarks run end to end with small sizes on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.gpu import facts
from loadtest.gpu_sections import SECTIONS


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "loadtest.gpu", "--smoke", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)


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


def test_failing_section_prints_a_line_and_exits_with_1() -> None:
    done = run("--sections", "prefill", "--budget", "0")
    assert done.returncode == 1
    assert "| prefill | FAILED |" in done.stdout
    assert run("--sections", "nonsense").returncode == 2


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
