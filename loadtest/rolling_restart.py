"""A rolling restart under load: locust's users call two servers behind nginx, which are replaced
one after the other.

    python -m loadtest.rolling_restart --users 20 --calm 10

Passes (status 0) if every request was answered. A server must finish the requests it holds when it
gets SIGTERM, and later requests must go to the other server. nginx's log shows which server
answered each request.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.servers import Penstock, free_ports

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "deploy" / "nginx" / "penstock.conf"
PATIENCE_S = 180  # time limit for a drain, or for locust, on a busy machine
FLAGS = ("--threads", "1", "--drain-timeout", "60")
FRAME = """
daemon off;
master_process off; # a worker of root would become another user, who may not write here
pid nginx.pid;
error_log error.log;
events {{ worker_connections 1024; }}
http {{
    client_body_temp_path body; proxy_temp_path proxy; fastcgi_temp_path fastcgi;
    uwsgi_temp_path uwsgi; scgi_temp_path scgi;
    log_format exchange escape=json '{{"end":$msec,"took":$request_time,"status":$status,'
        '"complete":"$request_completion","servers":"$upstream_addr","answers":"$upstream_status"}}';
    access_log access.log exchange;
    {site}
}}
"""


@dataclass(frozen=True)
class Exchange:
    """One request in nginx's log; times are Unix seconds."""

    began: float
    ended: float
    status: int
    whole: bool
    servers: tuple[str, ...]  # host:port of all servers that were tried; the last one answered

    @classmethod
    def parse(cls, line: str) -> Exchange:
        entry = json.loads(line)
        servers = tuple(entry["servers"].replace(",", " ").split())
        began = entry["end"] - entry["took"]
        return cls(began, entry["end"], entry["status"], entry["complete"] == "OK", servers)

    @property
    def good(self) -> bool:
        return self.whole and self.status == 200


@dataclass(frozen=True)
class Restart:
    """One replacement of one server; times are Unix seconds."""

    server: str
    told: float
    left: float
    back: float
    status: int


def replace(server: Penstock) -> Restart:
    """Send SIGTERM to a server, wait for its exit, and start another one in its place."""
    told = time.time()
    server.process.send_signal(signal.SIGTERM)
    status = server.process.wait(PATIENCE_S)
    left = time.time()
    server.start()
    server.wait_ready()
    return Restart(server.address, told, left, time.time(), status)


@contextlib.contextmanager
def nginx(folder: Path, ports: list[int]) -> Iterator[None]:
    """Run nginx with our site on the first of `ports`, for servers on the other two."""
    site = SITE.read_text()
    for written, port in zip(("8000", "8001", "8002"), ports, strict=True):
        site = site.replace(f"127.0.0.1:{written}", f"127.0.0.1:{port}")
    (folder / "access.log").touch()
    (folder / "nginx.conf").write_text(FRAME.format(site=site))
    process = subprocess.Popen(["nginx", "-p", folder, "-c", "nginx.conf", "-e", "error.log"])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def users(options: argparse.Namespace, port: int, figures: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "locust", "-f", str(ROOT / "loadtest" / "locustfile.py")]
    command += ["--headless", "--only-summary", "--host", f"http://127.0.0.1:{port}"]
    command += ["-u", str(options.users), "-r", str(options.users)]
    command += ["--tokens-json", str(figures)]
    return subprocess.Popen(command, cwd=ROOT)


def read_log(folder: Path) -> list[Exchange]:
    return list(map(Exchange.parse, (folder / "access.log").read_text().splitlines()))


def wait_for_answers(folder: Path, count: int, load: subprocess.Popen[bytes]) -> None:
    """Wait until `count` requests were answered, because locust takes a while to start."""
    deadline = time.monotonic() + PATIENCE_S
    while len(read_log(folder)) < count:
        if load.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(
                f"fewer than {count} responses within {PATIENCE_S} s; see locust's output for why"
            )
        time.sleep(0.2)


def account(restart: Restart, exchanges: list[Exchange]) -> dict[str, Any]:
    """Count the requests around one restart by their outcome."""
    held = [
        e
        for e in exchanges
        if e.servers and e.servers[-1] == restart.server and e.began < restart.told < e.ended
    ]
    moved = [e for e in exchanges if restart.server in e.servers[:-1] and e.ended > restart.told]
    return {
        "server": restart.server,
        "exit_status": restart.status,
        "drain_s": round(restart.left - restart.told, 2),
        "back_after_s": round(restart.back - restart.left, 2),
        "held_when_told_to_leave": len(held),
        "of_those_finished": sum(e.good for e in held),
        "refused_and_served_by_the_other": sum(e.good for e in moved),
    }


def run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the rolling restart and return the report."""
    front, *behind = free_ports(3)
    figures = folder / "figures.json"
    with contextlib.ExitStack() as stack:
        servers = [Penstock(options.model, FLAGS, port) for port in behind]
        for server in servers:
            stack.callback(server.stop)
        for server in servers:
            server.wait_ready()
        stack.enter_context(nginx(folder, [front, *behind]))
        load = users(options, front, figures)
        stack.callback(load.kill)
        wait_for_answers(folder, options.users, load)
        restarts = []
        for server in servers:
            time.sleep(options.calm)
            restarts.append(replace(server))
        time.sleep(options.calm)
        stopped = time.time()
        load.terminate()
        status = load.wait(PATIENCE_S)
    exchanges = read_log(folder)
    # When locust stops, its users disconnect in mid-stream. Requests that end then are no failures.
    failed = [e for e in exchanges if not e.good and e.ended < stopped]
    measured = json.loads(figures.read_text())
    return {
        "command": "python -m loadtest.rolling_restart " + " ".join(sys.argv[1:]),
        "date": time.strftime("%Y-%m-%d"),
        "load_average": round(os.getloadavg()[0], 1),
        "users": options.users,
        "seconds": round(stopped - restarts[0].told + options.calm),
        "locust_status": status,
        "answers": measured["answers"],
        "failures": measured["failures"],
        "failures_in_nginx_log": len(failed),
        "client_cpu": round(measured["client_cpu"], 2),
        "restarts": [account(restart, exchanges) for restart in restarts],
    }


def passed(report: dict[str, Any]) -> bool:
    """Return whether nothing failed and each server finished its requests and exited with 0."""
    return report["failures"] == report["failures_in_nginx_log"] == 0 and all(
        restart["exit_status"] == 0
        and restart["held_when_told_to_leave"] == restart["of_those_finished"]
        for restart in report["restarts"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--users", type=int, default=20)
    parser.add_argument("--calm", type=float, default=10, help="seconds around each restart")
    parser.add_argument("--json", type=Path, help="also write the report to this file")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are stopped
    if shutil.which("nginx") is None:
        raise SystemExit("rolling_restart needs nginx (Debian: apt-get install nginx-light)")
    with tempfile.TemporaryDirectory(prefix="restart-") as folder:
        os.chmod(folder, 0o755)  # nginx's workers run as another user
        report = run(options, Path(folder))
    text = json.dumps(report, indent=1) + "\n"
    print(text, end="")
    if options.json:
        options.json.write_text(text)
    return 0 if passed(report) else 1


if __name__ == "__main__":
    sys.exit(main())
