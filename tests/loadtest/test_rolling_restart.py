"""The rolling restart of docs/deployment.md, and how its requests are counted."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.rolling_restart import Exchange, Restart, account, passed

ROOT = Path(__file__).resolve().parents[2]
A, B = "127.0.0.1:8001", "127.0.0.1:8002"
RESTART = Restart(A, told=100.0, left=102.0, back=105.0, status=0)


def line(began: float, ended: float, *servers: str, status: int = 200, whole: bool = True) -> str:
    """Return a line of nginx's log."""
    return json.dumps(
        {
            "end": ended,
            "took": ended - began,
            "status": status,
            "complete": "OK" if whole else "",
            "servers": ", ".join(servers),
            "answers": "200",
        }
    )


def report(*lines: str) -> dict[str, object]:
    restart = account(RESTART, [Exchange.parse(each) for each in lines])
    return {"failures": 0, "failures_in_nginx_log": 0, "restarts": [restart]}


def test_account_counts_each_request_for_the_server_that_answered() -> None:
    good = report(
        line(90, 95, A),  # ended before the restart
        line(99, 101, A),  # held by the server that restarts
        line(99, 101, B),  # held by the other server
        line(101, 103, A, B),  # refused, and answered by the other server
        line(106, 107, A),  # answered after the restart
    )
    [restart] = good["restarts"]  # type: ignore[misc]
    assert restart["held_when_told_to_leave"] == restart["of_those_finished"] == 1
    assert restart["refused_and_served_by_the_other"] == 1
    assert passed(good)


@pytest.mark.parametrize("fate", [{"status": 502}, {"whole": False}])
def test_passed_with_lost_request_is_false(fate: dict[str, object]) -> None:
    assert not passed(report(line(99, 101, A, **fate)))  # type: ignore[arg-type]
    assert not passed(report() | {"failures": 1})


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rolling_restart_under_load_loses_no_request(tmp_path: Path) -> None:
    if shutil.which("nginx") is None:
        pytest.skip("needs nginx (Debian: nginx-light)")
    if importlib.util.find_spec("locust") is None:
        pytest.skip("needs locust (the extra loadtest)")
    file = tmp_path / "report.json"
    command = [sys.executable, "-m", "loadtest.rolling_restart", "--users", "8", "--calm", "4"]
    done = subprocess.run([*command, "--json", file], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    restarts = json.loads(file.read_text())["restarts"]
    assert sum(restart["held_when_told_to_leave"] for restart in restarts) > 0
