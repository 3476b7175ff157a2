"""Run `penstock serve` as a process with real sockets, a real engine process and real signals."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from tests.support import web
from tests.support.process import START_S, STOP_S, Process, eventually
from tests.support.prometheus import metric
from tests.support.stories import Case


def engines_of(pid: int) -> list[psutil.Process]:
    """Return the engine processes of a server; it also starts others for templates."""
    children = psutil.Process(pid).children()
    return [child for child in children if "engine.process" in child.cmdline()]


class Server(Process):
    """`penstock serve` on the loopback address. `temp` is its TMPDIR."""

    def __init__(self, folder: Path, arguments: tuple[str, ...], env: dict[str, str]) -> None:
        self.temp = folder / "tmp"
        self.temp.mkdir()
        clean = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
        command = [sys.executable, "-m", "server", "serve", *arguments]
        super().__init__(command, folder / "stderr", {**clean, "TMPDIR": str(self.temp), **env})
        self._children: list[psutil.Process] = []

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.base_url.rpartition(":")[2])

    def wait_ready(self) -> None:
        url = f"{self.base_url}/ready"

        def ready() -> bool:
            with contextlib.suppress(httpx2.TransportError):  # the server may be shutting down
                return web.get(url, timeout=START_S).status_code == 200
            return self.process.poll() is not None

        with contextlib.suppress(AssertionError):
            eventually(ready, "the server is ready", START_S)
            if self.process.poll() is None:
                return
        pytest.fail(f"the server did not become ready; its stderr ends:\n{self.log[-4000:]}")

    @property
    def engine(self) -> psutil.Process:
        [engine] = self.children
        return engine

    @property
    def children(self) -> list[psutil.Process]:
        """The engine process. It is remembered, so that it is known after its parent's end."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self._children = engines_of(self.process.pid) or self._children
        return self._children

    def http(self, **options: Any) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(base_url=self.base_url, timeout=120, verify=False, **options)

    def metric(self, name: str, **labels: str) -> float:
        return metric(web.get(f"{self.base_url}/metrics", timeout=30).text, name, **labels)

    def wait_idle(self) -> None:
        """Wait until no request runs or waits and no KV block is in use."""
        gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        eventually(lambda: not any(map(self.metric, gauges)), "the engine is idle")

    def stop(self) -> None:
        """End the server and its engine process if they are still alive."""
        children = self.children
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.resume()  # a failed test may have left it stopped
        self.process.terminate()
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(STOP_S)
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()


@contextlib.contextmanager
def starting(*arguments: object, env: dict[str, str] | None = None) -> Iterator[Server]:
    """Start a server and yield it before it is ready.

    Unless `arguments` override it, the server has a free port and one engine thread, and lets
    requests wait: tests send crowds on a busy machine.
    """
    folder = Path(tempfile.mkdtemp(prefix="e2e-"))  # short: a socket's path has at most 107 bytes
    # The last one of repeated flags wins.
    flags = ("--port", "0", "--threads", "1", "--max-queue-wait", "600", *map(str, arguments))
    server = Server(folder, flags, env or {})
    try:
        yield server
    finally:
        server.stop()
        shutil.rmtree(folder)


@contextlib.contextmanager
def serving(*arguments: object, env: dict[str, str] | None = None) -> Iterator[Server]:
    """Start a server and yield it when it is ready."""
    with starting(*arguments, env=env) as server:
        server.wait_ready()
        yield server


@dataclass
class Answer:
    """The result of one completion with a single choice, streamed or not."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: str | None = None
    cached: int = 0
    done: bool = False  # the stream ended with [DONE]

    def take(self, body: dict[str, Any]) -> None:
        assert "error" not in body, body
        for choice in body["choices"]:
            self.ids += choice.get("token_ids") or []
            self.logprobs += (choice["logprobs"] or {}).get("token_logprobs", [])
            self.text += choice["text"]
            self.finish = choice["finish_reason"] or self.finish
        if usage := body.get("usage"):
            self.cached = usage["prompt_tokens_details"]["cached_tokens"]


def greedy(case: Case, **more: Any) -> dict[str, Any]:
    """Return a request whose answer must be `case`."""
    return {
        "prompt": case.prompt_ids,
        "max_tokens": len(case.ids),
        "temperature": 0,
        "logprobs": 0,
        "return_token_ids": True,
        **more,
    }


async def complete(http: httpx2.AsyncClient, body: dict[str, Any]) -> Answer:
    """Send `body` and return the whole answer, read as a stream if `stream` is true."""
    answer = Answer()
    if not body.get("stream"):
        response = await http.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        answer.take(response.json())
        return answer
    body = body | {"stream_options": {"include_usage": True}}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                answer.done = True
            elif line.startswith("data: "):
                answer.take(json.loads(line[6:]))
    assert answer.done
    return answer


def check(answer: Answer, case: Case) -> None:
    assert answer.ids == case.ids
    assert answer.logprobs == pytest.approx(case.logprobs, abs=1e-3)
    assert answer.finish == "length"
