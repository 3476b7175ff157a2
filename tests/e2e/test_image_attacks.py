"""Damaged and hostile images over HTTP: an answer or a 400, and /health answers meanwhile."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest

from server.images.pool import LIMITS
from tests.support.hostile_pictures import hostile, mutated
from tests.support.serve import Server, serving
from tests.support.tiny_smolvlm import write_seeing

SEEDS = range(2, 12)
CONCURRENT = 6
MAX_HEALTH_S = 3.0  # on a machine with other programs; docs/images.md has the measured times
MAX_ANSWER_S = 60.0

# A process of its own: this one is busy with base64. It polls until its stdin ends.
POLLER = """
import http.client, json, select, sys, time
host = sys.argv[1]
taken = []
while not select.select([sys.stdin], [], [], 0.005)[0]:
    began = time.perf_counter()
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    taken.append(time.perf_counter() - began)
    connection.close()
print(json.dumps(taken))
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = write_seeing(tmp_path_factory.mktemp("seeing") / "smolvlm")
    with serving(folder, "--dtype", "float32") as running:
        yield running


@contextlib.contextmanager
def polling_health(server: Server, taken: list[float]) -> Iterator[None]:
    """Poll /health from another process; add the seconds of each answer to `taken`."""
    host = server.base_url.removeprefix("http://")
    command = [sys.executable, "-c", POLLER, host]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as poller:
        try:
            yield
        finally:
            out, _ = poller.communicate("\n")
    assert poller.returncode == 0
    taken += json.loads(out)


def peak_of_decoders(server: Server) -> int:
    """Return the largest peak of the processes that decode, in bytes of resident memory."""
    peaks = [0]
    for child in psutil.Process(server.process.pid).children():
        with contextlib.suppress(OSError, psutil.Error):
            if "server.images.worker" in child.cmdline():
                status = Path(f"/proc/{child.pid}/status").read_text(encoding="ascii")
                peaks += [int(kib) << 10 for kib in re.findall(r"VmHWM:\s+(\d+) kB", status)]
    return max(peaks)


def body_of(data: bytes) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_hostile_images_get_an_answer_or_a_reason_and_health_answers(server: Server) -> None:
    files = [*mutated(SEEDS), *hostile()]
    bodies = [(name, json.dumps(body_of(data)).encode()) for name, data in files]
    assert len(bodies) >= 300
    outcomes: Counter[str] = Counter()
    seconds: list[float] = []
    health: list[float] = []
    memory = 0
    waiting = iter(bodies)

    async def attack(http: httpx2.AsyncClient) -> None:
        nonlocal memory
        for name, body in waiting:
            began = time.monotonic()
            response = await http.post(
                "/v1/chat/completions",
                content=body,
                headers={"content-type": "application/json"},
            )
            seconds.append(time.monotonic() - began)
            memory = max(memory, peak_of_decoders(server))
            assert response.status_code in (200, 400), (name, response.text)
            outcome = "an answer"
            if response.status_code == 400:
                error = response.json()["error"]
                outcome = error["message"]
                assert error["param"] == "messages", name
                assert 10 < len(outcome) < 300, name
                assert "ended its process" not in outcome, name
            outcomes[re.sub(r"\d+", "N", outcome)[:60]] += 1

    with polling_health(server, health):
        async with server.http() as http:
            await asyncio.gather(*(attack(http) for _ in range(CONCURRENT)))
    health.sort()
    print(f"\n{len(bodies)} images, decoders {memory >> 20} MiB, slowest {max(seconds):.2f} s")
    figures = [health[len(health) * part // 1000] * 1e3 for part in (500, 990, 999)]
    print("/health: median {:.1f} ms, p99 {:.1f} ms, p99.9 {:.1f} ms".format(*figures), end=", ")
    print(f"most {health[-1] * 1e3:.1f} ms of {len(health)}")
    print(*(f"{count:4} {outcome}" for outcome, count in outcomes.most_common()), sep="\n")
    assert outcomes["an answer"] > 20
    assert len(outcomes) > 5
    assert memory <= LIMITS.memory
    assert max(seconds) <= MAX_ANSWER_S
    assert health[-1] <= MAX_HEALTH_S
    server.wait_idle()
    assert "Traceback" not in server.log
