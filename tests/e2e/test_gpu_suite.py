"""`python -m loadtest.gpu --smoke`: the GPU suite runs from end to end, small and on a CPU."""

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


def test_figures_in_a_table_and_in_json(tmp_path: Path) -> None:
    done = run("--sections", "prefill", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["failed"] == {}
    for row in written["rows"]:
        assert row["value"] > 0
        # As soon as it is known, and once more at the end.
        assert done.stdout.count(f"| {row['what']} |") == 2
    assert {"memory read", "8B, prefill of 32"} <= {row["what"] for row in written["rows"]}


def test_a_section_that_fails_is_a_line_and_a_status() -> None:
    done = run("--sections", "prefill", "--budget", "0")
    assert done.returncode == 1
    assert "| prefill | FAILED |" in done.stdout
    assert run("--sections", "nonsense").returncode == 2


def test_figures_outlive_a_machine_without_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert facts("gpu-check")["commit"] == "unknown"


def test_the_wheels_for_a_gpu_machine_have_penstocks_own() -> None:
    """The server asks for its version, which a tree that is not installed does not tell."""
    root = Path(__file__).parents[2]
    shown = subprocess.run(
        ["make", "-n", "gpu-wheels"], cwd=root, capture_output=True, text=True, check=True
    )
    assert "pip wheel -q --no-deps -w build/gpu-wheels .\n" in shown.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", SECTIONS)
def test_every_section(name: str) -> None:
    done = run("--sections", name)
    assert done.returncode == 0, done.stderr + done.stdout
