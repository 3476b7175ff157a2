"""`python -m loadtest.gpu --smoke`: the GPU benchmarks run end to end with small sizes on a CPU."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.gpu import __main__ as suite
from loadtest.gpu.__main__ import facts, run_section
from loadtest.gpu.bench import Row
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


@pytest.mark.parametrize("group", GROUPS)
def test_run_gives_every_section_its_limit_within_the_budget(
    group: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each section takes all of its limit, on a clock that only sections move."""
    clock = 0.0
    limits: dict[str, float] = {}

    def run_section(name: str, flags: list[str], seconds: float) -> tuple[list[Row], str]:
        nonlocal clock
        clock += seconds
        limits[name] = seconds
        rows = [Row(f"row of {name}", 1.0, "x")]
        return (2 * rows if name == "ceilings" else rows), ""

    path = tmp_path / "out.json"
    monkeypatch.setattr(suite, "run_section", run_section)
    monkeypatch.setattr(suite.time, "monotonic", lambda: clock)
    monkeypatch.setattr(
        sys, "argv", ["gpu", "--smoke", "--group", group, "--budget", "300", "--json", str(path)]
    )
    assert suite.main() == 1
    assert sum(limits.values()) <= 300
    assert all(seconds <= SECTIONS[name].seconds for name, seconds in limits.items())
    written = json.loads(path.read_text())
    expected = {"ceilings", *GROUPS[group]}
    assert limits.keys() | written["failed"].keys() == expected
    assert set(written["failed"].values()) == {"no time left"}, "300 s do not hold the whole group"
    assert "FAILED" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_dry_run_of_gpu_check_walks_every_section_within_its_limit() -> None:
    root = Path(__file__).parents[2]
    make = ["make", "gpu-check", "GPU_DRY=1", f"BIN={Path(sys.executable).parent}"]
    done = subprocess.run(make, cwd=root, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((root / "build" / "gpu-check-dry.json").read_text())
    assert written["failed"] == {}
    assert written["gpu"] == "none", "a dry run must not look like a measurement"
    for name in GROUPS["check"]:
        assert f"{name}: done after" in done.stdout
    assert any(row["what"].startswith("timeline, llama-3.1-8b") for row in written["rows"])
    assert any(row["what"].startswith("0.6B, 1 stream, GPU idle") for row in written["rows"])


ON_CPU = "hidden_states or logits_for_each_chunk_size_equal_golden and None or adapters and eager"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_gpu_tests_pass_on_the_cpu_double() -> None:
    """One test of each model of `make gpu-check`, so that none is broken when a GPU is there."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", "-k", ON_CPU]
    environment = os.environ | {"GPU_TESTS_ON": "cpu"}
    done = subprocess.run(
        command,
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    assert "skipped" not in done.stdout.splitlines()[-1]


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
