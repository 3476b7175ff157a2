"""The load run under Prometheus from the docs, and its checks."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from deploy.grafana.render import Window
from deploy.prometheus.api import Prometheus, Series
from deploy.prometheus.watched_run import faults
from tests.support.process import ROOT

AT = Window(1000.0, 1900.0)
EXPOSITION = "# HELP penstock:a A.\n# TYPE penstock:a gauge\npenstock:a 1\n"
needs_prometheus = pytest.mark.skipif(
    not (shutil.which("prometheus") and shutil.which("promtool")),
    reason="needs prometheus and promtool (Debian's package prometheus)",
)


class Seen(Prometheus):
    """A Prometheus with all series, except for the faults given to it."""

    def __init__(self, missing: str = "", up: float = 1.0, firing: str = "") -> None:
        self.missing, self.up, self.firing = missing, up, firing

    def range(self, query: str, start: float, end: float, step: float) -> list[Series]:
        return [Series({}, [(1000.0, 1.0), (1010.0, self.up)])]

    def now(self, query: str) -> list[Series]:
        fires = self.firing and query.startswith("ALERTS")
        return [Series({"alertname": self.firing}, [(1.0, 1.0)])] if fires else []

    def has(self, name: str) -> bool:
        return name != self.missing


@needs_prometheus
def test_faults_of_a_complete_run_are_empty() -> None:
    assert list(faults(Seen(), EXPOSITION, AT, "8s")) == []


@needs_prometheus
def test_faults_name_each_problem_of_a_run() -> None:
    def told(prometheus: Prometheus, exposition: str = EXPOSITION) -> str:
        return "\n".join(faults(prometheus, exposition, AT, "8s"))

    missing = told(Seen(missing="penstock:num_preemptions_total"))
    assert 'panel "Preemptions": there is no series penstock:num_preemptions_total' in missing
    assert "alert PenstockPreempting: there is no series" in missing
    assert told(Seen(up=0.0)) == "the server did not answer 1 of 2 scrapes"
    assert told(Seen(firing="PenstockDown")) == "PenstockDown fires in a healthy run"
    assert "promtool refuses the exposition" in told(Seen(), "penstock:a one\n")


@pytest.mark.slow
@needs_prometheus
def test_watched_run_succeeds_and_draws_the_dashboard(tmp_path) -> None:
    picture = tmp_path / "dashboard.svg"
    command = ["-m", "deploy.prometheus.watched_run", "--seconds", "15", "--svg", str(picture)]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "no problems found" in done.stdout
    assert 20_000 < len(picture.read_text()) < 300_000
