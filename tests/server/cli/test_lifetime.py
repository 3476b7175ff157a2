"""Start and end of a server: real processes and signals, with a fake engine."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from server.cli.lifetime import ECHO_S
from tests.support import web
from tests.support.process import ROOT, Process
from tests.support.reference_data import LLAMA, located
from tests.support.serve import engines_of

FAKE = ROOT / "tests" / "support" / "fake_serve.py"


@pytest.fixture
def start(tmp_path: Path, model: Path) -> Iterator[Any]:
    started: list[Process] = []

    def fake(**plan: object) -> Process:
        environ = {name: str(plan.pop(name)) for name in list(plan) if name.isupper()}
        given = json.dumps({"model": str(model), **plan})
        return run([sys.executable, str(FAKE), given], **environ)

    def run(command: list[str], **environ: str) -> Process:
        env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "."}
        started.append(Process(command, tmp_path / f"stderr{len(started)}", env | environ))
        return started[-1]

    fake.run = run  # type: ignore[attr-defined]
    yield fake
    for running in started:
        running.process.kill()
        running.process.wait()


@contextlib.contextmanager
def streaming(server: Process, tokens: int) -> Iterator[Iterator[str]]:
    """Yield the remaining lines of a stream whose first line has arrived."""
    server.wait_for("try  ")
    body = {"prompt": "Hello", "max_tokens": tokens, "stream": True}
    with web.stream("POST", f"{server.base_url}/v1/completions", json=body, timeout=30) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        yield lines


def test_banner_with_public_host_warns_and_has_under_15_lines(start: Any) -> None:
    server = start(host="0.0.0.0")
    server.wait_for("warning .*without an API key")
    banner = server.log[server.log.index("penstock 0") :]
    assert (
        "4 bytes, taken as it fills (64 blocks of 16 tokens): room for 2.0 requests of 512 tokens"
        in banner
    )
    assert "serves tiny: Fake, 1 parameters, float32" in banner
    assert len(banner.splitlines()) < 15


@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
@pytest.mark.parametrize(
    ("keys", "variable", "file"),
    [
        ([], "", ""),
        (["s3cret"], "s3cret", ""),
        (["s3cret", "other"], "s3cret,other", ""),
        ([], "", "\n# the team's\n  # and\n\ns3cret\nother\n"),
    ],
    ids=["no key", "one key", "two keys", "file"],
)
@pytest.mark.variants(1)
def test_banner_curl_line_works_as_printed(
    start: Any, tmp_path: Path, keys: list[str], variable: str, file: str
) -> None:
    environ = {"PENSTOCK_API_KEY": variable} if variable else {}
    path = tmp_path / "the keys"
    path.write_text(file)
    server = start(api_key=keys, api_key_file=str(path) if file else None, **environ)
    line = server.wait_for(r"try +(curl .*)\n")[1]
    assert "s3cret" not in server.log
    environ["PATH"] = "/usr/bin:/bin"
    answer = subprocess.run(["sh", "-c", line], capture_output=True, env=environ, timeout=30)
    assert json.loads(answer.stdout)["choices"][0]["finish_reason"] == "length", answer


@pytest.mark.slow
def test_banner_with_key_unknown_to_the_shell_shows_a_placeholder(start: Any) -> None:
    server = start(api_key=["s3cret"], PENSTOCK_API_KEY="another")
    line = server.wait_for(r"try +(curl .*)\n +\(replace KEY by one of your API keys\)\n")[1]
    assert "Bearer KEY" in line
    assert "s3cret" not in server.log


@pytest.mark.slow
def test_json_log_of_a_failed_server_has_only_records(start: Any) -> None:
    server = start(log_format="json", fatal="The engine broke.", dies_after_s=2)
    assert server.status() == 3
    records = [json.loads(line) for line in server.log.splitlines()]
    life = [record for record in records if record["logger"] == "server.life"]
    assert life[0]["event"].startswith("listening on http://127.0.0.1:")
    assert any(record["event"].startswith("try ") for record in life), "the banner"
    assert (records[-1]["event"], records[-1]["level"]) == ("The engine broke.", "error")


def test_json_log_after_sigterm_ends_with_a_record(start: Any) -> None:
    server = start(log_format="json")
    server.wait_for("try ")
    server.signal(signal.SIGTERM)
    assert server.status() == 0
    last = json.loads(server.log.splitlines()[-1])
    assert (last["event"], last["level"]) == ("stopped by SIGTERM", "info")


@pytest.mark.slow
def test_serve_with_port_in_use_fails_before_loading(start: Any) -> None:
    secret = "key-of-another-process"
    held = "import socket, sys, time; s = socket.create_server(('127.0.0.1', 0)); " + (
        "sys.stderr.write(f'listening on http://127.0.0.1:{s.getsockname()[1]},\\n'); "
        "sys.stderr.flush(); time.sleep(60)"
    )
    server = start.run([sys.executable, "-c", held, "--api-key", secret])
    port = server.base_url.rpartition(":")[2]
    other = start.run([sys.executable, "-m", "server", "serve", "--port", port])
    as_json = ["--port", port, "--log-format", "json", "--api-key", secret]
    recorded = start.run([sys.executable, "-m", "server", "serve", *as_json])
    assert (other.status(10), recorded.status(10)) == (1, 1)
    warning, refusal = [json.loads(line) for line in recorded.log.splitlines()]
    assert (warning["level"], refusal["level"]) == ("warning", "error")
    assert warning["event"].startswith("--api-key stays in the shell")
    assert refusal["event"].startswith(f"Port {port} is in use")
    assert f"Port {port} is in use by process {server.process.pid} (" in other.log
    assert "--port" in other.log
    assert secret not in other.log, "command lines hold keys"
    assert len(other.log.splitlines()) == 1


def test_server_while_loading_listens_and_reports_the_stage(start: Any) -> None:
    server = start(load_s=60)
    answer = web.get(f"{server.base_url}/ready")
    assert (answer.status_code, answer.json()["stage"]) == (503, "reading weights")
    server.wait_for("penstock: reading weights")
    server.signal(signal.SIGTERM)
    assert server.status() == 0
    assert server.log.splitlines()[-1] == "penstock: stopped by SIGTERM"


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGINT, signal.SIGHUP)),
    ],
)
def test_first_signal_drains_open_requests(start: Any, number: signal.Signals) -> None:
    server = start(token_s=0.05)
    with streaming(server, tokens=40) as lines:
        server.signal(number)
        server.wait_for("finishing accepted requests")
        ready = web.get(f"{server.base_url}/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        refused = web.post(f"{server.base_url}/v1/completions", json={"prompt": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert '"finish_reason":"length"' in "".join(rest)
    assert server.status() == 0
    assert server.log.splitlines()[-1] == f"penstock: stopped by {number.name}"
    assert "Traceback" not in server.log


@pytest.mark.slow
def test_sighup_under_nohup_is_ignored(start: Any, model: Path) -> None:
    given = json.dumps({"model": str(model)})
    server = start.run(["nohup", sys.executable, str(FAKE), given])
    server.wait_for("try  ")
    server.signal(signal.SIGHUP)
    time.sleep(0.5)
    assert web.get(f"{server.base_url}/ready").status_code == 200


def test_sighup_with_key_file_rereads_it(start: Any, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    server = start(api_key_file=str(file))
    server.wait_for("try  ")

    def statuses() -> list[int]:
        keys = ("old", "new", "newer")
        headers = [{"authorization": f"Bearer {key}"} for key in keys]
        return [web.get(f"{server.base_url}/version", headers=h).status_code for h in headers]

    assert statuses() == [200, 401, 401]
    file.write_text("new\nnewer\n")
    server.signal(signal.SIGHUP)
    server.wait_for("2 API keys read")
    assert statuses() == [401, 200, 200]
    file.write_text("")
    server.signal(signal.SIGHUP)
    server.wait_for("the API keys are unchanged: .*no API key")
    assert statuses() == [401, 200, 200]


@pytest.mark.slow
def test_stream_with_closed_stderr_is_finished(model: Path) -> None:
    """The log's reader may be `head` or may have crashed, or the disk may be full."""
    given = json.dumps({"model": str(model), "token_s": 0.02})
    command = [sys.executable, str(FAKE), given]
    env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": "."}
    with subprocess.Popen(command, stderr=subprocess.PIPE, cwd=ROOT, env=env, text=True) as server:
        try:
            assert server.stderr is not None
            said = ""
            while "try  " not in said:
                said += server.stderr.readline()
            server.stderr.close()
            address = re.findall(r"listening on (http://\S+),", said)[0]
            body = {"prompt": "Hello", "max_tokens": 50, "stream": True}
            with web.stream("POST", f"{address}/v1/completions", json=body) as response:
                lines = response.iter_lines()
                next(lines)
                server.send_signal(signal.SIGTERM)
                rest = [line for line in lines if line]
            assert rest[-1] == "data: [DONE]"
            assert server.wait(30) == 0
        finally:
            server.kill()


@pytest.mark.slow
def test_server_with_uvloop_installed_uses_asyncio(start: Any, tmp_path: Path) -> None:
    """On uvloop a server that runs out of descriptors would not report it."""
    (tmp_path / "uvloop.py").write_text("raise SystemExit('uvloop was imported')")
    server = start(PYTHONPATH=f"{tmp_path}:.")
    server.wait_for("try  ")
    assert "uvloop" not in server.log


@pytest.mark.slow
def test_metrics_ignore_prometheus_multiproc_dir(start: Any, tmp_path: Path) -> None:
    """PROMETHEUS_MULTIPROC_DIR makes prometheus_client keep metrics in shared files."""
    server = start(PROMETHEUS_MULTIPROC_DIR=str(tmp_path / "none"))
    server.wait_for("try  ")
    assert "penstock:time_to_first_token_seconds" in web.get(f"{server.base_url}/metrics").text


@pytest.fixture
def few_files(start: Any, model: Path) -> Any:
    """A server that may have 64 open files; it needs about 20 of them for itself."""
    script = f'ulimit -Sn 48; ulimit -Hn 64; exec {sys.executable} {FAKE} "$0"'
    server = start.run(["bash", "-c", script, json.dumps({"model": str(model)})])
    server.wait_for("try  ")
    soft, hard = psutil.Process(server.process.pid).rlimit(psutil.RLIMIT_NOFILE)
    assert soft == hard == 64
    return server


HALF_A_REQUEST = (
    b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n"
    b"Content-Type: application/json\r\n\r\n"
)


@contextlib.contextmanager
def crowd(server: Any, sent: bytes) -> Iterator[list[socket.socket]]:
    address = httpx2.URL(server.base_url)
    with contextlib.ExitStack() as stack:
        connections = []
        for _ in range(80):
            connection = socket.create_connection((address.host, address.port), timeout=10)
            connections.append(stack.enter_context(connection))
            connection.sendall(sent)
        yield connections


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        pytest.param(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", marks=pytest.mark.slow),
    ],
)
def test_idle_connections_are_closed_when_files_run_out(few_files: Any, sent: bytes) -> None:
    """Otherwise a probe of /health would wait until a connection ends."""
    with crowd(few_files, sent) as connections:
        for _ in range(60):
            assert web.get(f"{few_files.base_url}/health", timeout=30).status_code == 200
        while connections[0].recv(65536):
            pass  # the oldest connection is closed first
        connections[-1].setblocking(False)
        with contextlib.suppress(BlockingIOError):  # the newest connection is still open
            assert connections[-1].recv(65536)
    few_files.signal(signal.SIGTERM)
    assert few_files.status(10) == 0
    assert "Traceback" not in few_files.log


@pytest.mark.slow
def test_server_out_of_files_logs_once_and_recovers(few_files: Any) -> None:
    with crowd(few_files, HALF_A_REQUEST):
        few_files.wait_for("new connections wait")
        time.sleep(2.5)  # asyncio retries every second
    assert web.get(f"{few_files.base_url}/health", timeout=30).status_code == 200
    assert few_files.log.count("Too many open files") == 1
    assert "Traceback" not in few_files.log


@pytest.mark.slow
def test_server_out_of_files_exits_without_asyncio_traceback(few_files: Any) -> None:
    """asyncio retries on the closed socket. With a backlog of N, each second has N times as many
    retries as the one before."""
    with crowd(few_files, HALF_A_REQUEST):
        few_files.wait_for("new connections wait")
        time.sleep(2.5)
        few_files.signal(signal.SIGTERM)
        few_files.wait_for("finishing accepted requests")
        time.sleep(0.3)
    assert few_files.status(30) == 0
    assert "Traceback" not in few_files.log


def last_event(lines: Iterator[str]) -> Any:
    """Return the last event of a stream that is interrupted."""
    *_, last = (line for line in lines if line)
    return json.loads(last.removeprefix("data: "))


def test_drain_timeout_ends_streams_with_an_error_and_exits_with_0(start: Any) -> None:
    server = start(token_s=0.1, drain_timeout=0.5)
    with streaming(server, tokens=400) as lines:
        server.signal(signal.SIGTERM)
        assert "error" in last_event(lines)
    assert server.status(10) == 0
    assert "Traceback" not in server.log


@pytest.mark.variants(1)
@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_second_signal_exits_at_once(start: Any, number: signal.Signals, status: int) -> None:
    server = start(token_s=0.1)
    with streaming(server, tokens=400):
        server.signal(number)
        server.wait_for("send the signal again to exit at once")
        time.sleep(ECHO_S)
        server.signal(number)
        assert server.status(5) == status


@pytest.mark.slow
def test_two_signals_at_the_same_time_count_as_one(start: Any) -> None:
    server = start(token_s=0.1)
    with streaming(server, tokens=10) as lines:
        server.signal(signal.SIGTERM)
        server.signal(signal.SIGINT)  # the kernel would merge two signals of the same kind
        assert "data: [DONE]" in lines
    assert server.status() == 0


def test_engine_death_makes_health_fail_and_exits_with_3(start: Any) -> None:
    server = start(token_s=0.1, fatal="The engine process was killed.", dies_after_s=3.0)
    with contextlib.suppress(httpx2.HTTPError), streaming(server, tokens=400) as lines:
        assert any("engine_unavailable" in line for line in lines)
    assert web.get(f"{server.base_url}/health").status_code == 503
    assert server.status() == 3
    assert server.log.splitlines()[-1] == "penstock: The engine process was killed."
    assert "Traceback" not in server.log


def test_configuration_refused_by_the_engine_exits_with_2(start: Any) -> None:
    server = start(load_s=60, fatal="config.json has no vocab_size.", config_error=True)
    assert server.status() == 2
    assert server.log.splitlines()[-1] == "penstock: config.json has no vocab_size."
    assert "Traceback" not in server.log


def patched(model: Path, patch: str) -> subprocess.CompletedProcess[str]:
    """Run the fake server (module `f`) after `patch`, a line of Python."""
    plan = json.dumps({"model": str(model)})
    code = (
        "import sys; sys.path.insert(0, 'tests/support')\n"
        "import fake_serve as f, server.cli.lifetime\n"
        f"{patch}\n"
        f"sys.argv = ['', {plan!r}]\n"
        "sys.exit(f.main())"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30)


@pytest.mark.slow
def test_failing_lifespan_exits_with_1(model: Path) -> None:
    answer = patched(model, "f.PlannedEngine.start = lambda self: 1 / 0")
    assert answer.returncode == 1
    assert "ZeroDivisionError" in answer.stderr


@pytest.mark.slow
def test_failing_background_task_exits_with_1(model: Path) -> None:
    answer = patched(model, "server.cli.lifetime.banner = lambda *facts: 1 / 0")
    assert answer.returncode == 1
    assert "ZeroDivisionError" in answer.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")
def test_killed_real_engine_exits_with_3_after_serving(start: Any) -> None:
    folder = located(LLAMA)
    server = start.run([sys.executable, "-m", "server", "serve", str(folder), "--port", "0"])
    line = server.wait_for(r"try +(curl .*)\n")[1]
    answer = subprocess.run(["bash", "-c", line], capture_output=True, timeout=60)
    assert json.loads(answer.stdout)["usage"]["completion_tokens"] > 0, answer
    [engine] = engines_of(server.process.pid)
    engine.kill()
    assert server.status() == 3
    assert server.log.splitlines()[-1].startswith("penstock: The engine process was killed by")
    assert "Traceback" not in server.log
