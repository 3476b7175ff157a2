"""Two replicas behind Ray Serve: streams, aborts, and the death of a replica or an engine.

Ray takes 250 MB and is not part of the test extra. If it is missing, the tests install it in a
temporary virtual environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.support.process import ROOT, eventually
from tests.support.prometheus import metric

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

START_S = 120
ACTOR = "ray::ServeReplica:default:Replica"
LONG = {"prompt": "Tell me", "max_tokens": 900, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="session")
def ray_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python interpreter with Ray and the packages of this one."""
    if find_spec("ray"):
        return sys.executable
    folder = tmp_path_factory.mktemp("ray")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "base.pth").write_text(str(Path(httpx2.__file__).parents[1]))
    command = [folder / "bin/pip", "install", "-q", "-c", ROOT / "constraints.txt", "ray[serve]"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        pytest.skip(f"needs ray[serve] from the package index: {why}")
    return str(folder / "bin/python")


class Cluster:
    """`python -m deploy.ray` with two replicas of the demo model on a free port."""

    def __init__(self, python: str, log: Path, port: int, **more: object) -> None:
        settings = {"threads": 1, "min_replicas": 2, "max_replicas": 2, "port": port, **more}
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(
                [python, "-m", "deploy.ray", *(f"{k}={v}" for k, v in settings.items())],
                stdout=stream,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )

    @property
    def log(self) -> str:
        return self._log.read_text()

    def wait_ready(self) -> None:
        def ready() -> bool:
            return "Ray Serve listens" in self.log or self.process.poll() is not None

        eventually(ready, "Ray Serve listens", START_S)
        if self.process.poll() is not None:
            pytest.fail(self.log[-4000:])

    @property
    def replicas(self) -> list[psutil.Process]:
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [process for process in found if _command(process) == ACTOR]

    def exposition(self, headers: dict[str, str] | None = None) -> str:
        return httpx2.get(f"{self.url}/metrics", headers=headers, timeout=30).text

    def ranks(self, headers: dict[str, str] | None = None) -> set[str]:
        """Return the ranks of the replicas that answer."""
        return set(re.findall(r'build_info{engine="(\d+)"', self.exposition(headers)))

    def wait_for_two(self) -> None:
        def two() -> bool:
            return self.ranks() == {"0", "1"} and len(self.replicas) == 2

        eventually(two, "two replicas", START_S)

    def wait_idle(self) -> None:
        eventually(lambda: not metric(self.exposition(), "num_requests_running"), "idle")

    def stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.process.kill()


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return (process.cmdline() or [""])[0]
    return ""


@contextlib.contextmanager
def closing_cluster(python: str, log: Path, **more: object) -> Iterator[Cluster]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    cluster = Cluster(python, log, port, **more)
    try:
        cluster.wait_ready()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="module")
def cluster(ray_python: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with closing_cluster(ray_python, tmp_path_factory.mktemp("cluster") / "log") as cluster:
        yield cluster


async def stream(cluster: Cluster, body: dict[str, Any]) -> list[str]:
    """Send a streaming request and return the data of its events."""
    events: list[str] = []
    async with (
        httpx2.AsyncClient(timeout=120) as http,
        http.stream("POST", f"{cluster.url}/v1/completions", json=body) as answer,
    ):
        assert answer.status_code == 200, await answer.aread()
        async for line in answer.aiter_lines():
            events += [line[6:]] if line.startswith("data: ") else []
    return events


# Ray's agent has a fixed port, so this test must run before the module's shared cluster starts.
def test_metrics_with_api_key_require_it(ray_python: str, tmp_path: Path) -> None:
    bearer = {"authorization": "Bearer secret"}
    settings = {"api_key": "secret", "min_replicas": 1, "max_replicas": 1}
    with closing_cluster(ray_python, tmp_path / "log", **settings) as cluster:
        assert httpx2.get(f"{cluster.url}/metrics", timeout=30).status_code == 401
        assert cluster.ranks(bearer) == {"0"}


def test_cluster_answers_and_streams_like_a_single_server(cluster: Cluster) -> None:
    body = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    answer = httpx2.post(
        f"{cluster.url}/v1/chat/completions", json=body | {"temperature": 0}, timeout=60
    )
    assert answer.json()["choices"][0]["message"]["content"] == "The capital of France is Paris."
    assert len(answer.headers.get_list("x-request-id")) == 1
    events = asyncio.run(stream(cluster, LONG | {"max_tokens": 5}))
    assert events[-1] == "[DONE]"
    choices = [choice for event in events[:-1] for choice in json.loads(event)["choices"]]
    assert [choice["finish_reason"] for choice in choices][-1] == "length"


def test_cluster_errors_equal_those_of_a_single_server(cluster: Cluster) -> None:
    for path, fields, status, code in (
        ("/v1/completions", {"prompt": "hi", "model": "other"}, 404, "model_not_found"),
        ("/v1/completions", {"prompt": "hi " * 10000}, 400, "context_length_exceeded"),
        ("/v1/completions", {"prompt": "x" * 9_000_000}, 413, "request_too_large"),
        ("/nothing", {}, 404, "not_found"),
    ):
        answer = httpx2.post(f"{cluster.url}{path}", json=fields, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize("streamed", [True, False])
def test_client_disconnect_aborts_the_request_in_the_engine(
    cluster: Cluster, streamed: bool
) -> None:
    def aborts() -> float:
        return metric(cluster.exposition(), "aborts_total", reason="disconnect")

    async def leave() -> None:
        async with httpx2.AsyncClient(timeout=60) as http:
            body = LONG | {"stream": streamed}
            post = asyncio.create_task(http.post(f"{cluster.url}/v1/completions", json=body))
            while not metric(await asyncio.to_thread(cluster.exposition), "num_requests_running"):
                assert not post.done(), "the request ended before the disconnect"
            post.cancel()
            await asyncio.gather(post, return_exceptions=True)

    before = aborts()
    asyncio.run(leave())
    eventually(lambda: aborts() == before + 1, "the abort is counted", 5)
    cluster.wait_idle()


@pytest.mark.parametrize("victim", ["replica", "engine"])
def test_killed_replica_fails_only_its_own_streams_and_restarts(
    cluster: Cluster, victim: str
) -> None:
    cluster.wait_for_two()
    replica = cluster.replicas[0]
    [engine] = replica.children()

    async def load() -> list[list[str]]:
        tasks = [asyncio.create_task(stream(cluster, LONG)) for _ in range(8)]
        while True:
            text = await asyncio.to_thread(cluster.exposition)
            running = [metric(text, "num_requests_running", engine=e) for e in ("0", "1")]
            if sum(running) == 8 and all(running):
                break
            assert not any(task.done() for task in tasks), "a stream ended before all of them ran"
        (replica if victim == "replica" else engine).send_signal(signal.SIGKILL)
        return await asyncio.gather(*tasks)

    results = asyncio.run(load())
    cut = [events for events in results if events[-1] != "[DONE]"]
    assert cut, "the killed replica had none of the streams"
    assert len(cut) < len(results), "the other replica had none of the streams"
    for events in cut:
        assert json.loads(events[-1])["error"]["code"] == "engine_unavailable"
        assert "[DONE]" not in events
    eventually(lambda: not replica.is_running() and not engine.is_running(), "both have ended")
    began = time.monotonic()
    while cluster.ranks() != {"0", "1"}:
        answer = httpx2.post(
            f"{cluster.url}/v1/completions", json={"prompt": "hi", "max_tokens": 2}, timeout=60
        )
        assert answer.status_code == 200, "the other replica keeps serving"
        assert time.monotonic() - began < START_S


def test_cluster_listens_only_on_loopback(cluster: Cluster) -> None:
    """The exception is the port that Ray opens on all addresses for each Serve replica."""
    family = psutil.Process(cluster.process.pid).children(recursive=True)
    open_ports = {
        (_command(process).partition(":default:")[0], connection.laddr.ip)
        for process in family
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    wide = {name for name, ip in open_ports if not re.match(r"(::ffff:)?127\.|::1$", ip)}
    assert wide <= {"ray::ServeReplica"}


def test_metrics_cover_all_replicas_and_check_the_host(cluster: Cluster) -> None:
    ranks = [cluster.ranks() for _ in range(5)]
    assert ranks == [{"0", "1"}] * 5

    def tokens() -> tuple[float, ...]:
        text = cluster.exposition()
        return tuple(metric(text, "generation_tokens_total", engine=rank) for rank in "01")

    def differ() -> bool:
        httpx2.post(f"{cluster.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
        return len(set(tokens())) == 2

    # A replica keeps its rank, and so its series, from scrape to scrape.
    eventually(differ, "one replica has generated more than the other")
    assert len({tokens() for _ in range(5)}) == 1
    stranger = httpx2.get(f"{cluster.url}/metrics", headers={"host": "evil.example"}, timeout=30)
    assert (stranger.status_code, stranger.json()["error"]["code"]) == (400, "invalid_host")


def test_invalid_settings_exit_with_2_before_ray_starts(ray_python: str) -> None:
    for argument, words in (
        ("routing=nearest", "random, least-loaded, prefix"),
        ("min_replicas=0", "at least 1"),
        ("max_model_length=5", "no settings"),
        ("block_size=17", "--block-size"),
    ):
        done = subprocess.run(
            [ray_python, "-m", "deploy.ray", argument],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 2
        assert words in done.stderr.splitlines()[-1]


def test_rayservice_manifest_is_valid_for_ray_serve_and_our_app(ray_python: str) -> None:
    code = """
import sys, yaml
from ray.serve.schema import ServeDeploySchema
from deploy.ray.app import build
spec = yaml.safe_load(open("deploy/ray/rayservice.yaml"))["spec"]
config = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
build(config.applications[0].args)
"""
    command = [ray_python, "-c", code]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert done.returncode == 0, done.stderr
