"""Read Prometheus expositions, and check files with Prometheus's own promtool."""

from __future__ import annotations

import shutil
import subprocess

import pytest
from prometheus_client.parser import text_string_to_metric_families


def promtool(*arguments: object, stdin: str = "") -> tuple[int, str]:
    """Run promtool; return exit status and output. Skips the test if promtool is missing."""
    path = shutil.which("promtool")
    if path is None:
        pytest.skip("needs promtool (Debian's package prometheus)")
    command = [path, *map(str, arguments)]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def metric(exposition: str, name: str, **labels: str) -> float:
    """Return the sum of the samples of `penstock:name` that have `labels`."""
    # Parsing the other series, too, takes 20 ms, and tests read a series until it has a value.
    lines = [line for line in exposition.splitlines() if line.startswith(f"penstock:{name}")]
    families = text_string_to_metric_families("\n".join(lines) + "\n")
    samples = [s for family in families for s in family.samples if s.name == f"penstock:{name}"]
    assert samples, f"no series {name}"
    return sum(s.value for s in samples if labels.items() <= s.labels.items())
