"""`penstock run`, `ps`, `stop` and `list`, with real servers of the demo model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from engine.checkpoint.folder import DEMO_FOLDERS
from server.cli import servers as server_module
from server.cli.serve import masked
from server.cli.servers import (
    RunningServer,
    ServerChoiceError,
    default_url,
    is_serve_command,
    stop_server,
)
from tests.support.process import ROOT

PENSTOCK = [sys.executable, "-m", "server"]
KEY = "a-key-of-this-test"


def penstock(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PENSTOCK, *arguments],
        env=os.environ | environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    """A server of the demo model under a name of its own; its key keeps its name from others."""
    command = [*PENSTOCK, "serve", "demo", "--port", "0", "--served-model-name", "listed-demo"]
    process = subprocess.Popen(
        command,
        env=os.environ | {"PENSTOCK_API_KEY": KEY},
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if "serves listed-demo" in line:
            break
    with process:
        yield process
        process.kill()


def row_of(process: subprocess.Popen[str], table: str) -> str:
    """Return the row of a process in the table of `ps`."""
    rows = [row for row in table.splitlines() if f" {process.pid} " in row]
    assert len(rows) == 1, table
    return rows[0]


@pytest.mark.slow
def test_ps_lists_model_url_and_state_and_stop_ends_the_server(
    server: subprocess.Popen[str],
) -> None:
    listed = penstock("ps", PENSTOCK_API_KEY=KEY)
    row = row_of(server, listed.stdout)
    assert row.startswith("listed-demo ")
    assert "http://127.0.0.1:" in row
    assert " ready " in row
    assert row_of(server, penstock("ps", PENSTOCK_API_KEY="").stdout).startswith("demo ")
    stopped = penstock("stop", "listed-demo", PENSTOCK_API_KEY=KEY)
    assert (stopped.returncode, server.wait(10)) == (0, 0)
    assert f"Stopped listed-demo (process {server.pid})." in stopped.stderr
    again = penstock("stop", str(server.pid))
    assert again.returncode == 1
    assert f"No server fits '{server.pid}'" in again.stderr


def test_run_with_text_answers_once_and_leaves_no_server() -> None:
    before = servers_below()  # one that other tests share
    answer = penstock("run", "demo", "What is the capital of France?")
    assert answer.returncode == 0, answer.stderr
    assert "Paris" in answer.stdout
    assert servers_below() == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_run_ends_its_server_when_it_is_terminated(number: signal.Signals) -> None:
    command = [*PENSTOCK, "run", "demo"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        deadline = time.monotonic() + 60
        while not (servers := servers_below(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        [server] = servers
        process.send_signal(number)
        assert process.wait(30) == 128 + number
        assert not server.is_running()


def test_run_unknown_model_exits_with_the_servers_reason() -> None:
    before = servers_below()
    answer = penstock("run", "/no/such/folder", "hi")
    assert answer.returncode == 2
    assert answer.stderr.startswith("penstock: No model folder at /no/such/folder.")
    assert servers_below() == before


def servers_below(pid: int | None = None) -> list[psutil.Process]:
    """The servers that this process or process `pid` has started."""
    return [
        c for c in psutil.Process(pid).children(recursive=True) if is_serve_command(c.cmdline())
    ]


def test_list_shows_demo_models_and_complete_models_of_the_cache(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    refs = tmp_path / "hub" / "models--org--name" / "refs"
    refs.mkdir()
    (refs / "main").write_text("a" * 40)
    (snapshot / "config.json").write_text("{}")
    listed = penstock("list", HF_HOME=str(tmp_path)).stdout
    assert [row.split()[0] for row in listed.splitlines()] == ["MODEL", *DEMO_FOLDERS]
    (snapshot / "model.safetensors").write_bytes(bytes(2_500_000))
    [row] = [r for r in penstock("list", HF_HOME=str(tmp_path)).stdout.splitlines() if "org/" in r]
    assert row.split()[:3] == ["org/name", "2.5", "MB"]
    assert row.endswith(str(snapshot))


@pytest.mark.parametrize(
    ("arguments", "serves"),
    [
        (["/usr/bin/python3", "/x/.venv/bin/penstock", "serve", "demo"], True),
        (["penstock", "serve"], True),
        (["python", "-P", "-m", "server", "serve", "--port", "1"], True),
        (["python", "-m", "server", "chat", "serve"], False),
        (["python", "-m", "ray", "serve"], False),
        (["penstock", "chat"], False),
        (["timeout", "60", "penstock", "serve", "demo"], False),
        (["bash", "-c", "penstock serve demo"], False),
        (["sudo", "python3", "-m", "server", "serve"], False),
        ([], False),
    ],
)
def test_is_serve_command_recognises_servers(arguments: list[str], serves: bool) -> None:
    assert is_serve_command(arguments) is serves


def test_stop_without_name_needs_a_single_server() -> None:
    me = psutil.Process()
    servers = [RunningServer(me, f"http://127.0.0.1:{n}", (f"m{n}",), "ready") for n in (1, 2)]
    with pytest.raises(ServerChoiceError, match=r"2 servers fit: .* They are m1 \(process"):
        stop_server(servers, None)
    with pytest.raises(ServerChoiceError, match="No server fits 'm3'"):
        stop_server(servers, "m3")
    with pytest.raises(ServerChoiceError, match="No Penstock server is running"):
        stop_server([], None)


@pytest.mark.parametrize(
    ("ports", "url"),
    [
        ([], "http://127.0.0.1:8000"),
        ([8131], "http://127.0.0.1:8131"),
        ([8131, 8000, 8132], "http://127.0.0.1:8000"),
        ([0, 8131], "http://127.0.0.1:8131"),  # 0: does not listen yet
    ],
)
def test_default_url_is_port_8000_or_the_only_server(
    monkeypatch: pytest.MonkeyPatch, ports: list[int], url: str
) -> None:
    monkeypatch.setattr(server_module, "_serve_processes", lambda: ports)
    monkeypatch.setattr(server_module, "_url_of", lambda p: f"http://127.0.0.1:{p}" if p else "")
    assert default_url() == url
    monkeypatch.setattr(server_module, "_serve_processes", lambda: [8131, 8132])
    with pytest.raises(ServerChoiceError, match=r"2 servers .*8131, http://127\.0\.0\.1:8132"):
        default_url()


@pytest.mark.slow
def test_key_on_the_command_line_is_masked_and_the_server_is_still_found() -> None:
    """Every user of a machine can read the command lines of all processes."""
    arguments = ["serve", "demo", "--port", "0", "--api-key", KEY, f"--api-key={KEY}2"]
    with subprocess.Popen(
        [*PENSTOCK, *arguments], cwd=ROOT, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        log = ""
        for line in process.stderr:
            log += line
            if "serves demo" in line:
                break
        try:
            shown = Path(f"/proc/{process.pid}/cmdline").read_bytes()
            assert KEY.encode() not in shown
            assert b"--api-key *** --api-key=***" in shown
            assert "masked; use PENSTOCK_API_KEY or --api-key-file" in log
            assert KEY not in log
            stopped = penstock("stop", str(process.pid), PENSTOCK_API_KEY=KEY)
            assert (stopped.returncode, process.wait(10)) == (0, 0)
        finally:
            process.kill()


def test_masked_command_line_hides_only_values_of_secret_flags() -> None:
    given = ["penstock", "serve", "m", "--api-key", "a b", "--port", "1", "--api-key=c", "-x"]
    shown = ["penstock", "serve", "m", "--api-key", "***", "--port", "1", "--api-key=***", "-x"]
    assert masked(given) == shown
