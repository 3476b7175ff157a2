"""locust users that read streams: `locust -f loadtest/locustfile.py --host http://127.0.0.1:8000`.

Each user is a closed loop: it sends a request, reads the response to its end, and sends the next
one. A response is one locust request, so locust's own charts, failures and rates count responses.

The table has additional rows for `ttft`, `itl` (each gap) and `tokens/s` (per response). The page
/tokens of the web interface, or the file of --tokens-html, charts them over time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from locust import User, constant, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtest.bench import BACK_OFF_S, PATHS, Server, calibrate, find
from loadtest.charts import document
from loadtest.errors import BenchError
from loadtest.http_client import Completion, Target, stream_blocking
from loadtest.report import BUSY_CLIENT
from loadtest.timeline import Timeline
from loadtest.workload import Scale, workload

TIMEOUT_S = 300.0


class Test:
    """One test run: its server, its prompts, and its results over time."""

    def __init__(self, environment: Environment) -> None:
        options = environment.parsed_options
        assert options is not None
        url = environment.host or "http://127.0.0.1:8000"
        target = Target.parse(url, os.environ.get("PENSTOCK_API_KEY", "").partition(",")[0])
        model, longest = asyncio.run(find(target, url, options.model or None))
        self.server = Server(target, url, model, options.api, options.ignore_eos, TIMEOUT_S)
        scale = Scale.parse(options.length_scale)
        self.workload = workload(options.workload, scale, longest)
        prose = asyncio.run(calibrate(self.server))
        self.texts = prose.texts(self.workload, random.Random(_seed(environment)))
        self.timeline = Timeline()
        self.began, self.cpu = time.monotonic(), time.process_time()

    def client_cpu(self) -> float:
        """Return the CPU time of this process as a share of one core."""
        return (time.process_time() - self.cpu) / (time.monotonic() - self.began)


def _seed(environment: Environment) -> int | str:
    """Return a different seed for each worker: equal prompts would hit the prefix cache."""
    assert environment.parsed_options is not None
    seed: int = environment.parsed_options.seed
    worker = environment.runner.worker_index if isinstance(environment.runner, WorkerRunner) else 0
    return f"{seed} of worker {worker}" if worker else seed


class Reader(User):
    """A user that reads a whole stream before it sends its next request."""

    wait_time = constant(0)

    @task
    def answer(self) -> None:
        test = running(self.environment)
        text, tokens = next(test.texts)
        path, body = test.server.request(text, tokens)
        done = stream_blocking(test.server.target, path, body, test.server.timeout)
        failure = RuntimeError(f"{done.error} {done.status or ''}: {done.message}")
        self.environment.events.request.fire(
            request_type="SSE",
            name=path,
            response_time=(done.ended - done.started) * 1e3,
            response_length=done.tokens,
            exception=failure if done.error else None,
            context={"completion": done},
        )
        if done.error:
            time.sleep(BACK_OFF_S)  # locust has replaced it by gevent's sleep


def running(environment: Environment) -> Test:
    test: Test = environment.penstock_test  # type: ignore[attr-defined]
    return test


@events.init_command_line_parser.add_listener
def _(parser: LocustArgumentParser) -> None:
    group = parser.add_argument_group("Streams")
    group.add_argument("--workload", default="mix", help="as for `penstock bench run`")
    group.add_argument("--length-scale", default="1", help="as for `penstock bench run`")
    group.add_argument("--model", default="", help="default: the server's first model")
    group.add_argument("--api", choices=sorted(PATHS), default="chat")
    group.add_argument("--seed", type=int, default=0)
    group.add_argument("--no-ignore-eos", dest="ignore_eos", action="store_false")
    group.add_argument("--tokens-html", default="", help="write charts over time to this file")
    group.add_argument("--tokens-json", default="", help="write the test's figures to this file")


@events.init.add_listener
def _(environment: Environment, **_: Any) -> None:
    # gevent's clock has not advanced since before the imports, which take seconds on a busy
    # machine. Without a turn of its loop, --run-time would end too early by the same amount.
    time.sleep(0.001)
    if environment.web_ui and environment.web_ui.app:
        environment.web_ui.app.add_url_rule("/tokens", "tokens", lambda: _page(environment))

    def log(context: dict[str, Any], **_: Any) -> None:
        if done := context.get("completion"):
            _log(environment, done)

    environment.events.request.add_listener(log)


@events.test_start.add_listener
def _(environment: Environment, **_: Any) -> None:
    if isinstance(environment.runner, MasterRunner):
        return  # only its workers send requests
    try:
        environment.penstock_test = Test(environment)  # type: ignore[attr-defined]
    except BenchError as error:
        if environment.web_ui is None:
            raise SystemExit(f"locust: {error}") from None
        logging.error(error)  # the web interface stays up, so that the user can retry
        assert environment.runner is not None
        environment.runner.quit()


def _log(environment: Environment, done: Completion) -> None:
    """Log figures directly, because request events would count as responses."""
    test = running(environment)
    test.timeline.add(done)
    if done.error or not done.arrivals:
        return
    entries = environment.stats
    entries.get("ttft", "").log(_ms(done.arrivals[0] - done.started), 0)
    for gap in done.gaps:
        entries.get("itl", "").log(_ms(gap), 0)
    if (reading := done.ended - done.arrivals[0]) > 0:
        entries.get("tokens/s", "").log(round((done.tokens - 1) / reading), 0)


def _ms(seconds: float) -> int:
    return round(seconds * 1e3)


def _notes(test: Test) -> list[str]:
    return [
        f"{test.server.model} at {test.server.url}, workload {test.workload.name}.",
        f"This client used {test.client_cpu():.0%} of a core.",
    ]


def _page(environment: Environment) -> str:
    if not hasattr(environment, "penstock_test"):
        return document("Nothing has been measured yet", [])
    test = running(environment)
    return test.timeline.page(f"{test.server.model}: latency over time", _notes(test))


@events.test_stop.add_listener
def _(environment: Environment, **_: Any) -> None:
    options = environment.parsed_options
    if options is None or not hasattr(environment, "penstock_test"):
        return
    if options.tokens_html:
        Path(options.tokens_html).write_text(_page(environment), encoding="utf-8")
    test = running(environment)
    if options.tokens_json:
        figures = {
            "command": "locust " + " ".join(sys.argv[1:]),
            "date": time.strftime("%Y-%m-%d %H:%M"),
            "model": test.server.model,
            "workload": test.workload.name,
            "users": environment.runner.target_user_count if environment.runner else 0,
            "answers": environment.stats.total.num_requests,
            "failures": environment.stats.total.num_failures,
            "client_cpu": test.client_cpu(),
            "load_average": os.getloadavg()[0],
            **test.timeline.summary(),
        }
        Path(options.tokens_json).write_text(json.dumps(figures, indent=1) + "\n")
    for note in _notes(test):
        logging.info(note)
    if test.client_cpu() > BUSY_CLIENT:
        logging.warning(
            "This client was busy, so the latencies include its own delays. Use --processes."
        )
