"""A rolling restart under load: two servers behind nginx, locust's users, one server replaced
after the other.

    python -m loadtest.rolling_restart --users 20 --calm 10

Passes (status 0) where every request was answered: those a server had when it was told to leave
were finished by it, those that came later went to the other. nginx's log tells who served what.
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
PATIENCE_S = 180  # for a drain, or locust, on a busy machine
FLAGS = ("--threads", "1", "--drain-timeout", "60")
FRAME = """
daemon off;
worker_processes 1;
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
    """One request as nginx saw it; times are Unix seconds."""

    began: float
    ended: float
    status: int
    whole: bool
    servers: tuple[str, ...]  # host:port of all that were asked, the one that answered last

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
    """Tells a server to leave, and starts another one in its place."""
    told = time.time()
    server.process.send_signal(signal.SIGTERM)
    status = server.process.wait(PATIENCE_S)
    left = time.time()
    server.start()
    server.wait_ready()
    return Restart(server.address, told, left, time.time(), status)


@contextlib.contextmanager
def nginx(folder: Path, ports: list[int]) -> Iterator[None]:
    """nginx with our site on the first port, the servers on the others."""
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
    """Until so many requests were answered: locust's start takes a while."""
    deadline = time.monotonic() + PATIENCE_S
    while len(read_log(folder)) < count:
        if load.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"fewer than {count} answers within {PATIENCE_S} s; locust tells why")
        time.sleep(0.2)


def account(restart: Restart, exchanges: list[Exchange]) -> dict[str, Any]:
    """What became of the requests around one restart."""
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
    """Runs it and returns the report."""
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
    # Its users leave in the middle of an answer when locust stops: what ends then is no failure.
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
    """Nothing failed, and each server finished what it held and left with 0."""
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
    parser.add_argument("--json", type=Path, help="write the report here, too")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that servers are ended
    if shutil.which("nginx") is None:
        raise SystemExit("rolling_restart needs nginx (Debian: apt-get install nginx-light)")
    with tempfile.TemporaryDirectory(prefix="restart-") as folder:
        os.chmod(folder, 0o755)  # nginx's workers have a user of their own
        report = run(options, Path(folder))
    text = json.dumps(report, indent=1) + "\n"
    print(text, end="")
    if options.json:
        options.json.write_text(text)
    return 0 if passed(report) else 1


if __name__ == "__main__":
    sys.exit(main())
