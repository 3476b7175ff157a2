"""locust's users, run in separate processes.

locust replaces the standard library's sockets by gevent's, which must not happen in the test
runner.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from pathlib import Path

import httpx2
import pytest

from tests.support.scripted import scripted

ROOT = Path(__file__).resolve().parents[2]
COMMAND = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py"]

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("locust") is None,
    reason="needs locust: pip install -e '.[loadtest]'",
)


async def locust(*arguments: object) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        *map(str, arguments),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_locust_headless_users_measure_and_report_streams(tmp_path: Path) -> None:
    files = ("--tokens-html", tmp_path / "t.html", "--tokens-json", tmp_path / "t.json")
    async with scripted(first_s=0.1, gap_s=0.05) as server:
        status, _, err = await locust(
            "--headless", "-u", 3, "-r", 3, "-t", "3s", "--host", server.url, *files,
            "--workload", "40/5", "--csv", tmp_path / "run",
        )  # fmt: skip
        users = len(server.asked)
    assert status == 0, err
    assert users > 4
    figures = json.loads((tmp_path / "t.json").read_text())
    assert (figures["failures"], figures["workload"], figures["users"]) == (0, "40/5", 3)
    assert figures["answers"] >= 3
    assert figures["time to first token p50"] >= 100
    assert figures["between tokens p50"] >= 50
    assert figures["whole answer p50"] >= 300
    assert 0 < figures["client_cpu"] < 1
    rows = (tmp_path / "run_stats.csv").read_text()
    answers = re.search(r"^SSE,/v1/chat/completions,(\d+),0,", rows, re.MULTILINE)
    gaps = re.search(r"^,itl,(\d+),0,", rows, re.MULTILINE)
    total = re.search(r"^,Aggregated,(\d+),", rows, re.MULTILINE)
    assert answers is not None
    assert gaps is not None
    assert total is not None
    assert int(gaps[1]) == 4 * int(answers[1])
    assert total[1] == answers[1]  # gaps and first tokens do not count as requests
    assert (tmp_path / "t.html").read_text().count("<svg") == 5
    assert "This client used" in err


@pytest.mark.slow
async def test_locust_rejections_are_failures_and_make_users_pause() -> None:
    async with scripted(refuse=(503, "The queue is full.")) as server:
        status, _, err = await locust(
            "--headless", "-u", 2, "-r", 2, "-t", "2s", "--host", server.url
        )
        asked = len(server.asked)
    assert status == 1
    assert "rejected 503: The queue is full." in err
    assert asked <= 2 + 2 * 3


@pytest.mark.slow
async def test_locust_workers_send_different_prompts() -> None:
    """Equal prompts from several workers would hit the server's prefix cache."""
    async with scripted(first_s=0.05) as server:
        status, _, err = await locust(
            "--headless", "--processes", 2, "-u", 2, "-r", 2, "-t", "4s", "--host", server.url,
            "--workload", "40/5",
        )  # fmt: skip
        asked = [json.dumps(body["messages"]) for body in server.asked if body["max_tokens"] == 5]
    assert status == 0, err
    assert len(asked) > 4
    assert len(set(asked)) == len(asked)


async def test_locust_without_server_exits_at_once_with_one_line() -> None:
    status, _, err = await locust("--headless", "-t", "60s", "--host", "http://127.0.0.1:1")
    assert status == 1
    assert "No server answers at http://127.0.0.1:1" in err
    assert "Traceback" not in err


async def test_locust_web_interface_shows_the_charts() -> None:
    async with scripted() as server:
        listener = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        port = listener.sockets[0].getsockname()[1]
        listener.close()
        await listener.wait_closed()
        process = await asyncio.create_subprocess_exec(
            *COMMAND, "--web-host", "127.0.0.1", "--web-port", str(port), "--host", server.url,
            "--autostart", "-u", "1", cwd=ROOT, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            page = await _eventually(f"http://127.0.0.1:{port}/tokens", "Time to first token")
        finally:
            process.terminate()
            await process.wait()
    assert "<svg" in page
    assert "This client used" in page


async def _eventually(url: str, due: str) -> str:
    async with httpx2.AsyncClient(verify=False) as http:
        for _ in range(100):
            try:
                answer = await http.get(url)
            except httpx2.TransportError:
                answer = None
            if answer is not None and due in answer.text:
                return answer.text
            await asyncio.sleep(0.2)
    raise AssertionError(f"no {due!r} at {url} after 20 s")
