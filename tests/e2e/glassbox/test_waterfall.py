"""The waterfall of real requests to the demo: its sum, its neighbours, and `penstock inspect`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.serve import Server

UI = {"x-penstock-ui": "1"}


async def stream(
    http: httpx2.AsyncClient, request_id: str, prompt: Any, tokens: int, begun: asyncio.Event
) -> float:
    """Stream a completion and return the seconds it took; set `begun` at its first bytes."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    headers = {**UI, "x-request-id": request_id}
    start = time.monotonic()
    async with http.stream("POST", "/v1/completions", json=body, headers=headers) as response:
        assert response.status_code == 200
        async for _ in response.aiter_bytes():
            begun.set()
    return time.monotonic() - start


async def report_of(http: httpx2.AsyncClient, request_id: str) -> dict[str, Any]:
    """Return the report of a request, which is complete a moment after its last byte."""
    for _ in range(200):
        response = await http.get(f"/ui/api/requests/{request_id}", headers=UI)
        if response.status_code == 200:
            report: dict[str, Any] = response.json()
            return report
        await asyncio.sleep(0.05)
    raise AssertionError(response.text)


def check_sum(report: dict[str, Any]) -> None:
    assert sum(report["parts"].values()) == pytest.approx(report["wall_ms"], abs=0.01)


async def test_waterfall_of_a_lone_request_is_within_the_clients_time(demo: Server) -> None:
    async with demo.http() as http:
        await http.get("/v1/models")  # opens the connection
        seconds = await stream(http, "alone", "A river", 40, asyncio.Event())
        report = await report_of(http, "alone")
    check_sum(report)
    assert 0 < report["wall_ms"] <= 1000 * seconds + 20
    assert 1000 * seconds - report["wall_ms"] < 5000
    assert report["parts"]["others"] == 0
    assert report["who"] == []
    assert sum(step["decode"] for step in report["steps"]) == 39
    assert 0 < len(report["steps"]) <= 40  # right drafts save steps


async def test_waterfall_names_the_neighbour_with_the_long_prompt_first(demo: Server) -> None:
    begun, ended = asyncio.Event(), asyncio.Event()
    long = [5 + place % 1000 for place in range(900)]
    async with demo.http() as http:
        short = asyncio.create_task(stream(http, "short", "A river", 400, begun))
        await begun.wait()
        lake = asyncio.create_task(stream(http, "lake", "A lake", 10, asyncio.Event()))
        await stream(http, "long", long, 1, ended)
        await asyncio.gather(short, lake)
        report = await report_of(http, "short")
        own = await report_of(http, "long")
    check_sum(report)
    check_sum(own)
    names = [name for *_, name in report["who"]]
    assert names[0] == "long"
    assert report["who"][0][2] == 900
    chunks = [chunk[3] for chunk in own["choices"][0]["prefills"]]
    assert sum(chunks) == 900
    assert len(chunks) > 1
    assert report["parts"]["others"] > 0


@contextlib.contextmanager
def hogs(count: int) -> Iterator[None]:
    """Let processes compute on all cores of the test."""
    command = [sys.executable, "-c", "while True: pass"]
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            hog = stack.enter_context(subprocess.Popen(command))
            stack.callback(hog.kill)
        yield


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="needs Linux's counts")
async def test_waterfall_under_contention_names_the_waiting_for_a_core(demo: Server) -> None:
    """The steps before, without contention, tell the model; what the hogs take is not of it."""
    async with demo.http() as http:
        for number in range(3):
            await stream(http, f"calm-{number}", "A river", 60, asyncio.Event())
        with hogs(2 * len(os.sched_getaffinity(0))):
            shares = []
            for number in range(6):
                await stream(http, f"hogged-{number}", "A river", 60, asyncio.Event())
                report = await report_of(http, f"hogged-{number}")
                check_sum(report)
                parts, wall = report["parts"], report["wall_ms"]
                shares.append((parts["waiting"] / wall, abs(parts["unexplained"]) / wall))
    # Other programs disturb single requests. Cores that share a physical one are slower, too.
    assert sorted(waiting for waiting, _ in shares)[3] > 0.3, shares
    assert sorted(unexplained / waiting for waiting, unexplained in shares)[2] < 0.5, shares


def inspect(demo: Server, text: str) -> str:
    command = [sys.executable, "-m", "server", "inspect", text, "--url", demo.base_url]
    env = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


async def test_inspect_prints_the_parts_of_a_request(demo: Server) -> None:
    async with demo.http() as http:
        await stream(http, "inspected", "A river", 7, asyncio.Event())
        await report_of(http, "inspected")
    lines = inspect(demo, "inspected").splitlines()
    assert lines[0].startswith("inspected  ")
    assert [line.split()[0] for line in lines[1:8]] == [
        *("server", "queue", "base", "own", "others", "waiting", "unexplained")
    ]
    assert "7 tokens; finish: length" in lines[8]


def test_inspect_prints_the_tokens_of_a_prompt_and_warnings(demo: Server) -> None:
    text = inspect(demo, "Hello <|im_end|> there")
    assert "new" in text
    assert "<|im_end|>" in text
    assert "special_token_in_content" in text


def test_inspect_of_an_unknown_id_fails_with_the_reason(demo: Server) -> None:
    with pytest.raises(AssertionError, match="No request"):
        inspect(demo, f"req_{'0' * 32}")
