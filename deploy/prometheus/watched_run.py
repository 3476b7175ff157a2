"""Load a server under Prometheus and check its metrics, alerts and dashboard.

    python -m deploy.prometheus.watched_run --seconds 120 --svg docs/dashboard.svg

Starts `penstock serve`, and Prometheus with this folder's configuration and rules. Loads the
server while Prometheus scrapes it. Then checks that no scrape was missed, that promtool accepts the
exposition and the rules, and that every series of every panel and alert exists. Draws the dashboard
with `--svg`. Needs prometheus and promtool (Debian: `apt-get install prometheus`). The exit status
is 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx2
import yaml

from deploy.grafana.dashboard import metric_names, panels, substitute
from deploy.grafana.render import Window, render
from deploy.prometheus.api import Prometheus

FOLDER = Path(__file__).parent
RULES = FOLDER / "rules.yml"
START_S = 90
REFUSED = {"prompt": "x", "temperature": 9}
LEFT = {"prompt": "x", "max_tokens": 500, "ignore_eos": True, "stream": True}
# One thread leaves a core for the load generator and Prometheus. 40 blocks let the KV cache fill.
SERVE_FLAGS = ("--threads", "1", "--num-gpu-blocks-override", "40")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def running(command: Sequence[str], ready: str) -> Iterator[None]:
    """Run `command` in a context that begins when the URL `ready` answers 200.

    Raises RuntimeError if the process exits before that, or after START_S seconds.
    """
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            deadline = time.monotonic() + START_S
            while not answers(ready):
                if process.poll() is not None or time.monotonic() > deadline:
                    log.seek(0)
                    raise RuntimeError(f"{command[0]} did not start:\n{log.read()[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx2.TransportError):
        return httpx2.get(url, timeout=5).status_code == 200
    return False


def configuration(target: str, interval: str) -> str:
    """Return prometheus.yml for a target on this machine, with scrapes every `interval`."""
    document = yaml.safe_load((FOLDER / "prometheus.yml").read_text(encoding="utf-8"))
    document["global"] = {"scrape_interval": interval, "evaluation_interval": interval}
    document["rule_files"] = [str(RULES)]
    [scrape] = document["scrape_configs"]
    scrape["static_configs"] = [{"targets": [target]}]
    return yaml.safe_dump(document)


def load(url: str, seconds: float) -> None:
    """Run three loads, each for a third of the time. `disturb` the server before each of them."""
    bench = [sys.executable, "-m", "server", "bench", "run", "--url", url, "--workload", "mix"]
    for clients in (1, 4, 12):
        disturb(url)
        loaded = [*bench, "--concurrency", str(clients), "--seconds", str(seconds / 3)]
        subprocess.run(loaded, check=True)


def disturb(url: str) -> None:
    """Send three invalid requests, and one whose client disconnects during the answer."""
    completions = f"{url}/v1/completions"
    for _ in range(3):
        httpx2.post(completions, json=REFUSED, timeout=30)
    with httpx2.stream("POST", completions, json=LEFT, timeout=60) as answer:
        next(answer.iter_lines())


def promtool(*arguments: str, stdin: str = "") -> tuple[int, str]:
    done = subprocess.run(["promtool", *arguments], input=stdin, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def alerts() -> dict[str, str]:
    """Return the query of each alert, by its name."""
    groups = yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def faults(prometheus: Prometheus, exposition: str, at: Window, interval: str) -> Iterator[str]:
    """Yield each problem of the run as a sentence. Yields nothing if every check passes."""
    [up] = prometheus.range('up{job="penstock"}', at.start, at.end, at.step)
    if missed := sum(value < 1 for _, value in up.points):
        yield f"the server did not answer {missed} of {len(up.points)} scrapes"
    status, said = promtool("check", "metrics", stdin=exposition)
    if status not in (0, 3):  # 3: only warnings of style, such as the colon in names
        yield f"promtool refuses the exposition: {said}"
    status, said = promtool("check", "rules", str(RULES))
    if status:
        yield f"promtool refuses the rules: {said}"
    variables = {"__rate_interval": interval, "model_name": ".*"}
    queries = {q: f'panel "{p.title}"' for p in panels() for q, _ in p.queries}
    queries |= {query: f"alert {name}" for name, query in alerts().items()}
    for query, where in queries.items():
        for name in sorted(metric_names(query)):
            if not prometheus.has(name):
                yield f"{where}: there is no series {name}"
        prometheus.now(substitute(query, variables))  # raises ValueError if Prometheus rejects it
    for firing in prometheus.now('ALERTS{alertstate="firing"}'):
        yield f"{firing.labels['alertname']} fires in a healthy run"


def watch(given: argparse.Namespace) -> list[str]:
    """Run the server, Prometheus and the load; return the problems found."""
    url = f"http://127.0.0.1:{free_port()}"
    monitor = f"127.0.0.1:{free_port()}"
    serve = [sys.executable, "-m", "server", "serve", given.model, "--port", url.rpartition(":")[2]]
    serve += SERVE_FLAGS
    with tempfile.TemporaryDirectory() as folder, running(serve, f"{url}/ready"):
        (file := Path(folder) / "prometheus.yml").write_text(
            configuration(url.removeprefix("http://"), f"{given.interval}s")
        )
        command = ["prometheus", f"--config.file={file}", f"--web.listen-address={monitor}"]
        command += [f"--storage.tsdb.path={folder}/data", "--log.level=warn"]
        with running(command, f"http://{monitor}/-/ready"):
            prometheus = Prometheus(f"http://{monitor}")
            time.sleep(2 * given.interval)
            start = time.time()
            load(url, given.seconds)
            time.sleep(2 * given.interval)
            at, interval = Window(start, time.time()), f"{4 * given.interval}s"
            exposition = httpx2.get(f"{url}/metrics", timeout=30).text
            wrong = list(faults(prometheus, exposition, at, interval))
            if given.svg:
                given.svg.write_text(render(prometheus, at, interval), encoding="utf-8")
            report(prometheus, at)
    return wrong


def report(prometheus: Prometheus, at: Window) -> None:
    """Print figures of the run: scrapes, series, requests, tokens and the load average."""
    asked = {
        "scrapes": f"count_over_time(up[{round(at.end - at.start)}s])",
        "series": 'scrape_samples_scraped{job="penstock"}',
        "longest scrape, s": f"max_over_time(scrape_duration_seconds[{round(at.end - at.start)}s])",
        "requests": "sum(penstock:http_requests_total)",
        "tokens": "sum(penstock:generation_tokens_total)",
    }
    for what, query in asked.items():
        [found] = prometheus.now(query)
        print(f"{what}: {found.points[0][1]:g}")
    print(f"load average: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="demo", help="model to serve")
    parser.add_argument("--seconds", type=float, default=120.0, help="duration of the load")
    parser.add_argument("--interval", type=int, default=2, help="seconds between scrapes")
    parser.add_argument("--svg", type=Path, help="SVG file to draw the dashboard into")
    wrong = watch(parser.parse_args())
    for fault in wrong:
        print(f"FAILED: {fault}")
    print("no problems found" if not wrong else f"{len(wrong)} problems found")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
