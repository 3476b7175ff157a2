"""A short run of the script that compares the simulator with two real replicas.

The test checks that the prediction agrees within a factor of ten. docs/scaling.md has the exact
results.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process import ROOT


@pytest.mark.slow
def test_simulator_check_predicts_the_throughput_roughly(tmp_path: Path) -> None:
    figures, model = tmp_path / "figures.json", tmp_path / "model.json"
    script = [sys.executable, "-m", "loadtest.simulator_check", "mix"]
    short = ["--rounds", "1", "--seconds", "6", "--most-others", "99"]
    command = [*script, *short, "--json", str(figures), "--save", str(model)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    [first] = json.loads(figures.read_text())["rounds"]
    for loop in ("closed", "open"):
        measured, predicted = first[loop]["measured"], first[loop]["predicted"]
        assert measured["failed"] == predicted["failed"] == 0
        assert 0.1 < predicted["tokens_per_s"] / measured["tokens_per_s"] < 10
    question = ["mix", "--model", str(model), "--rate", "1", "--seconds", "20"]
    asked = [sys.executable, "-m", "loadtest.simulate", *question, "--slo", "ttft=20s"]
    answer = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert "keep the objective" in answer.stdout
