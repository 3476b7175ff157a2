"""`penstock explain` of a prompt, and of an answer that --record has written."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.process import eventually
from tests.support.serve import serving


def run_explain(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", "explain", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_command_explains_a_prompt_and_its_recorded_answer(tmp_path: Path) -> None:
    record = tmp_path / "answers.jsonl"
    with serving("demo", "--record", record) as server:
        url = ("--url", server.base_url)
        sampling = ("--seed", 5, "--temperature", 1.5, "--top-p", 0.9, "--max-tokens", 12)
        done = run_explain("Hello", *sampling, "--json", *url)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["agrees"] == len(report["tokens"])
        eventually(lambda: record.stat().st_size > 0, "the answer is recorded")
        again = run_explain("--from", record, "--json", *url)
        assert json.loads(again.stdout)["tokens"] == report["tokens"]
        shown = run_explain("--from", record, "--token", 0, *url).stdout
        own = next(one for one in report["tokens"][0][7] if one[0] == report["tokens"][0][0])
        [won] = [line for line in shown.splitlines() if line.endswith("won")]
        assert f" {own[1]:.2f} " in won
        assert f" {own[6]:.3g} " in won
        for wrong in (["--from", record, "--line", 9], ["--from", record, "--token", 99], []):
            refused = run_explain(*wrong, *url)
            assert refused.returncode in (1, 2)
            assert len(refused.stderr.splitlines()) == 1
