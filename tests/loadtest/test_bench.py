"""`penstock bench` against a scripted server with known times: its figures and its messages."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import xml.etree.ElementTree
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadtest import html_page, report, session
from loadtest.cli import app
from loadtest.errors import BenchError
from loadtest.measure import Load, Point, Slo, spread
from loadtest.session import Asked
from tests.support.process import INTERRUPTIBLE
from tests.support.scripted import Scripted, scripted

ROOT = Path(__file__).resolve().parents[2]


def asked(server: Scripted, **fields: Any) -> Asked:
    defaults: dict[str, Any] = {
        "url": server.url, "key": "", "model": None, "api": "chat", "concurrency": "", "rate": "",
        "workload": "40/4", "length_scale": "1", "arrivals": "poisson", "slo": None,
        "seconds": 0.5, "rounds": 1, "seed": 0,
        "ignore_eos": True, "timeout": 10.0,
    }  # fmt: skip
    return Asked(**defaults | fields)


async def measured(server: Scripted, **fields: Any) -> report.Report:
    return await session.measure(asked(server, **fields))


async def test_closed_loop_measures_server_times_and_sends_given_requests() -> None:
    async with scripted(first_s=0.05, gap_s=0.02, cached=10) as server:
        found = await measured(server, concurrency="2", slo="ttft=10s")
    [point] = found.points
    assert point.completed == point.requests >= 4
    assert point.ttft is not None
    assert point.itl is not None
    assert point.ttft.p50 >= 0.05
    assert point.itl.p50 >= 0.02
    assert point.goodput == point.requests_per_s > 0
    assert point.output_tokens == 4 * point.completed
    assert 36 <= point.prompt_tokens / point.completed <= 44  # two per word, ten for the template
    assert report.cached_share(point) == pytest.approx(10 / 40, rel=0.1)
    body = server.asked[-1]
    assert (body["model"], body["max_tokens"]) == ("one", 4)
    assert (body["ignore_eos"], body["skip_special_tokens"]) == (True, False)
    prompts = [asked["messages"][0]["content"] for asked in server.asked]
    assert len(set(prompts)) == len(prompts)


async def test_open_loop_measures_from_intended_arrival() -> None:
    """The server handles 8 requests/s and gets 20. Only the open loop shows the queue."""
    async with scripted(first_s=0.12, at_a_time=1) as server:
        found = await measured(server, concurrency="1", rate="20", seconds=1.0, slo="ttft=300ms")
    closed, opened = found.points
    assert closed.e2e is not None
    assert opened.e2e is not None
    assert opened.ttft is not None
    assert closed.e2e.p50 < 0.3
    assert opened.e2e.max > 2 * closed.e2e.p50
    assert opened.ttft.max > opened.requests * 0.12 - 1.2
    assert opened.goodput is not None
    assert opened.goodput < opened.requests / opened.seconds / 2
    assert opened.requests == opened.completed  # including those that ended after the load
    assert opened.requests_per_s <= 8.5


async def test_open_loop_with_same_seed_repeats_arrivals_and_prompts() -> None:
    async def run(seed: int) -> list[str]:
        async with scripted() as server:
            await measured(server, rate="40", seconds=0.5, seed=seed, workload="mix")
        return [asked["messages"][0]["content"] for asked in server.asked]

    first, again, other = await run(1), await run(1), await run(2)
    assert first == again != other
    assert 8 < len(first) < 50


@pytest.mark.slow
async def test_rate_in_percent_is_a_share_of_measured_saturation() -> None:
    async with scripted(first_s=0.01, at_a_time=1) as server:
        found = await measured(server, rate="50%,150%", seconds=1.0, rounds=2)
    half, more = (load for load in report.by_load(found.points))
    assert more.value == pytest.approx(3 * half.value)
    assert 10 < more.value < 150
    assert [len(points) for points in report.by_load(found.points).values()] == [2, 2]


async def test_saturation_without_tokens_in_time_raises_bench_error() -> None:
    async with scripted(first_s=0.5) as server:
        with pytest.raises(BenchError, match=r"No token arrived within 0\.2 s.*--seconds"):
            await measured(server, rate="50%", seconds=0.2)


async def test_rejections_are_counted_separately_with_latency() -> None:
    async with scripted(refuse=(503, "The queue is full.")) as server:
        found = await measured(server, rate="20")
    [point] = found.points
    assert point.rejected == point.requests > 0
    assert point.failed == {}
    assert point.reject is not None
    assert point.reject.count == point.rejected
    assert any("The queue is full." in note for note in report.notes(found))


async def test_closed_loop_client_pauses_after_a_rejection() -> None:
    async with scripted(refuse=(429, "Too many.")) as server:
        found = await measured(server, concurrency="2", seconds=0.5)
    assert found.points[0].rejected == 2


@pytest.mark.parametrize(
    ("fields", "kind", "words"),
    [
        ({"refuse": (400, "Too long.")}, "HTTP 400", "Too long."),
        ({"cut": True}, "cut off", "peer closed connection"),
    ],
)
async def test_failures_are_counted_by_kind(fields: dict[str, Any], kind: str, words: str) -> None:
    async with scripted(**fields) as server:
        found = await measured(server, concurrency="1", seconds=0.2)
    [point] = found.points
    assert point.failed == {kind: point.requests}
    assert words in point.messages[kind]
    assert point.completed == 0


@pytest.mark.parametrize(
    ("server_fields", "fields", "words"),
    [
        ({}, {"model": "three"}, "no model three; available: one, two"),
        ({"key": "k"}, {}, "401: Give a valid API key. Give the key with PENSTOCK_API_KEY."),
        ({"usage": False}, {}, "without a usage event"),
        ({}, {"workload": "900/200"}, "1100 tokens, but the model takes at most 1000"),
        ({}, {"workload": "chat"}, "Unknown workload chat"),
        ({}, {"length_scale": "0.1"}, "--length-scale applies only to traces"),
        ({}, {"length_scale": "no"}, "--length-scale: 'no' is not a factor"),
        ({}, {"arrivals": "recorded"}, "40/4 is not a trace with arrival times"),
        ({}, {"workload": __file__}, "is neither a trace of Mooncake or Azure"),
        ({}, {"slo": "ttft=5"}, "'ttft=5' is not a bound"),
        ({}, {"concurrency": "0"}, "'0' is not a number of clients"),
        ({}, {"rate": "fast"}, "'fast' is not a number of requests/s"),
        ({}, {"url": "http://127.0.0.1:1"}, "No server answers at http://127.0.0.1:1"),
        ({}, {"concurrency": ",", "rate": ","}, "No load is given"),
        ({}, {"concurrency": "9" * 5000}, "is not a number of clients"),
        ({}, {"url": f"http://{'a' * 64}.x"}, "label"),
        ({}, {"url": "http://["}, "http://[: Invalid IPv6 URL"),
        ({}, {"key": "k\u00e9y"}, "The API key has characters that an HTTP header cannot carry"),
    ],
)
async def test_measure_with_bad_options_or_server_raises_bench_error(
    server_fields: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    async with scripted(**server_fields) as server:
        with pytest.raises(BenchError, match=re.escape(words)):
            await measured(server, **{"concurrency": "1"} | fields)


async def test_report_round_trips_and_page_is_self_contained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["penstock"])  # the page shows it; pytest's may contain "nan"
    async with scripted(gap_s=0.001) as server:
        found = await measured(server, concurrency="1,2", rate="20,30", seconds=0.3, rounds=2)
    report.write(found, tmp_path / "sub" / "run.json")
    assert report.read(tmp_path / "sub" / "run.json") == found
    page = html_page.page(found)
    assert not re.search(r"<script|<link|@import|url\(|\b(src|href)=", page)
    pictures = re.findall(r"<svg.*?</svg>", page)
    assert len(pictures) == 12
    for picture in pictures:
        xml.etree.ElementTree.fromstring(picture)
    assert page.count("p99 at 30 req/s") == 3
    assert "nan" not in page


def a_point(load: Load, number: int, tokens_per_s: float) -> Point:
    times = spread([0.1, 0.2])
    return Point(
        load=load, round=number, seconds=1, requests=2, completed=2, rejected=0, failed={},
        messages={}, prompt_tokens=8, cached_tokens=0, output_tokens=4, tokens_per_s=tokens_per_s,
        requests_per_s=2, goodput=None, ttft=times, itl=times, tpot=times, e2e=times, reject=None,
        lateness=None, client_cpu=0.1,
    )  # fmt: skip


def a_report(loop: Any, *rates: float, client_cpu: float = 0.1) -> report.Report:
    points = [a_point(Load(loop, 8), number, rate) for number, rate in enumerate(rates, 1)]
    return report.Report(
        version=1, command="c", date="d", url="u", model="m", api="chat", workload="1/1",
        arrivals="poisson", left_out=0, seed=0, tokens_per_word=1, slo=None, client={},
        points=points,
    )  # fmt: skip


def test_compare_shows_medians_and_ranges_over_rounds(tmp_path: Path) -> None:
    for name, rates in (("a", (100.0, 90.0, 900.0)), ("b", (150.0, 140.0, 160.0))):
        report.write(a_report("closed", *rates), tmp_path / f"{name}.json")
    command = [sys.executable, "-m", "server", "bench", "compare"]
    files = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    done = subprocess.run([*command, *files], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    [line] = [line for line in done.stdout.splitlines() if "tokens/s" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == ["tokens/s", "100", "150", "1.50", "90.0 to 900", "140 to 160"]


def test_compare_without_common_load_or_with_other_file_raises(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no load in common: 8 clients and 8 req/s"):
        report.compare(a_report("closed", 1), a_report("open", 1))
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(BenchError, match=r"x\.json is not a report"):
        report.read(tmp_path / "x.json")


def test_spread_percentiles_interpolate_linearly() -> None:
    found = spread([0.4, 0.1, 0.2, 0.3, 0.5])
    assert found is not None
    assert (found.p50, found.p90, found.max) == pytest.approx((0.3, 0.46, 0.5))
    assert spread([None]) is None
    assert spread([2.0]) is not None


def test_slo_str_names_its_bounds() -> None:
    assert str(Slo.parse("ttft=500ms, itl=50ms,e2e=10s")) == (
        "ttft ≤ 500 ms, itl ≤ 50 ms, e2e ≤ 10000 ms"
    )


def test_notes_warn_of_busy_client() -> None:
    import msgspec

    calm = a_report("open", 1)
    busy = msgspec.structs.replace(
        calm, points=[msgspec.structs.replace(calm.points[0], client_cpu=0.9)]
    )
    assert not any("WARNING" in note for note in report.notes(calm))
    assert any("WARNING: this client used up to 90%" in note for note in report.notes(busy))


async def test_bench_run_with_failed_request_exits_with_1(tmp_path: Path) -> None:
    async with scripted(refuse=(500, "Broken.")) as server:
        command = [
            sys.executable, "-m", "server", "bench", "run", "--url", server.url,
            "--concurrency", "1", "--seconds", "0.3", "--workload", "40/4",
            "--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"),
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        out, err = await process.communicate()
    assert process.returncode == 1
    assert b"First HTTP 500, at 1 client: Broken." in out
    assert b"1 client: 0 of " in err
    assert (tmp_path / "a.json").is_file()
    assert (tmp_path / "a.html").is_file()


@pytest.mark.parametrize("flag", ["--json", "--html"])
@pytest.mark.variants(1)
async def test_bench_run_with_unwritable_report_fails_before_first_request(
    tmp_path: Path, flag: str
) -> None:
    async with scripted() as server:
        for target in (tmp_path, Path("/proc/none/a"), tmp_path / ("x" * 300)):
            command = [sys.executable, "-m", "server", "bench", "run", "--url", server.url]
            process = await asyncio.create_subprocess_exec(
                *command, flag, str(target), cwd=ROOT, stderr=asyncio.subprocess.PIPE
            )
            _, err = await process.communicate()
            assert process.returncode == 1
            [line] = err.decode().splitlines()
            assert f"{target} cannot be written" in line
    assert server.asked == []


def test_bench_run_with_same_file_for_json_and_html_fails() -> None:
    done = CliRunner().invoke(app, ["run", "--json", "a", "--html", "a"])
    assert (done.exit_code, "give two different files" in done.stderr) == (1, True)


STOPS = pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])


@STOPS
async def test_bench_run_stopped_by_signal_keeps_finished_loads(
    tmp_path: Path, stop: signal.Signals
) -> None:
    """SIGTERM is sent twice, as `timeout` does."""
    async with scripted() as server:
        command = [
            *INTERRUPTIBLE, sys.executable, "-m", "server", "bench", "run", "--url", server.url,
            "--concurrency", "1,2", "--seconds", "0.5", "--rounds", "1000", "--workload", "40/4",
            "--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html"),
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        assert process.stderr is not None
        assert b"1 client (round 1 of 1000)" in await process.stderr.readline()
        process.send_signal(stop)
        if stop is signal.SIGTERM:
            await process.stderr.readuntil(b"stopped by a signal\n")
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(stop)
        out, err = await process.communicate()
    # On a busy machine the second signal may come after Python has restored its default handlers.
    ends = [128 + stop, *([-stop] if stop is signal.SIGTERM else [])]
    assert process.returncode in ends
    assert b"INCOMPLETE (stopped by a signal)" in out
    assert b"| 1 client |" in out
    assert b"Traceback" not in err
    written = report.read(tmp_path / "a.json")
    assert written.stopped == "stopped by a signal"
    assert written.points[0].completed
    assert "INCOMPLETE" in (tmp_path / "a.html").read_text()


def test_ctrl_c_during_writing_exits_130(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement is done, so there is no task to cancel."""
    texts = ("command", "date", "url", "model", "api", "workload", "arrivals")
    nothing: dict[str, Any] = {"client": {}, "slo": None, "points": [], **dict.fromkeys(texts, "")}
    numbers = dict.fromkeys(("version", "left_out", "seed", "tokens_per_word"), 1)

    async def measure(asked: Asked) -> report.Report:
        return report.Report(**nothing, **numbers)

    monkeypatch.setattr(session, "measure", measure)
    monkeypatch.setattr(report, "write", lambda *_: signal.raise_signal(signal.SIGINT))
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores SIGINT
    try:
        result = CliRunner().invoke(app, ["run", "--json", str(tmp_path / "a.json")])
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert result.exit_code == 130


async def test_measure_error_after_first_load_keeps_finished_loads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = session.Run.measure

    async def measure(self: session.Run, load: Load, number: int) -> Point:
        if number == 2:
            raise BenchError("Nobody answers any more.")
        return await first(self, load, number)

    monkeypatch.setattr(session.Run, "measure", measure)
    async with scripted() as server:
        found = await measured(server, concurrency="1,2", seconds=0.1, rounds=3)
    assert [point.load.value for point in found.points] == [1, 2]
    assert found.stopped == "Nobody answers any more."
    assert "INCOMPLETE (Nobody answers any more.)" in "".join(report.notes(found))


@STOPS
async def test_bench_run_stopped_before_first_load_ends_writes_nothing(
    tmp_path: Path, stop: signal.Signals
) -> None:
    async with scripted() as server:
        command = [
            *INTERRUPTIBLE, sys.executable, "-m", "server", "bench", "run", "--url", server.url,
            "--concurrency", "1", "--seconds", "60", "--json", str(tmp_path / "a.json"),
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(
            *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        while len(server.asked) < 4:  # noqa: ASYNC110 - the first two are calibration
            await asyncio.sleep(0.01)
        process.send_signal(stop)
        assert await process.communicate() == (b"", b"")
    assert process.returncode == 128 + stop
    assert os.listdir(tmp_path) == []


async def test_bench_run_with_closed_stdout_still_writes_report(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    async with scripted() as server:
        command = [
            sys.executable, "-m", "server", "bench", "run", "--url", server.url,
            "--concurrency", "1", "--seconds", "0.3", "--workload", "40/4",
            "--json", str(tmp_path / "a.json"),
        ]  # fmt: skip
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=writer)
        os.close(writer)
        await process.wait()
    assert report.read(tmp_path / "a.json").points


def test_bench_run_with_failed_write_loses_only_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async def measure(asked: Asked) -> report.Report:
        (tmp_path / "a.json").mkdir()
        return a_report("closed", 1)

    monkeypatch.setattr(session, "measure", measure)
    targets = ["--json", str(tmp_path / "a.json"), "--html", str(tmp_path / "a.html")]
    done = CliRunner().invoke(app, ["run", *targets])
    assert done.exit_code == 1
    assert "8 clients" in done.stdout
    assert f"{tmp_path / 'a.json'} cannot be written" in done.stderr
    assert (tmp_path / "a.html").is_file()


def test_bench_run_help_is_quick_and_imports_nothing_heavy() -> None:
    code = (
        "import sys; from server.cli.main import app\n"
        "try: app(['bench', 'run', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'asyncio', 'h11', 'fastapi', 'loadtest.session', 'orjson'}\n"
        "print('loaded:', sorted(heavy & set(sys.modules)))\n"
        "import time; print(time.process_time())"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    loaded, seconds = done.stdout.splitlines()[-2:]
    assert loaded == "loaded: []", done.stderr
    assert float(seconds) < 5


async def test_recorded_arrivals_keep_the_bursts_of_the_trace(tmp_path: Path) -> None:
    """The trace has 20 bursts of four simultaneous requests."""
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2026-01-01 00:00:{s:02}.0000000,40,2" for s in range(0, 60, 3) for _ in range(4)]
    (tmp_path / "bursts.csv").write_text("\n".join(lines))
    async with scripted() as server:
        found = await measured(
            server, workload=str(tmp_path / "bursts.csv"), arrivals="recorded", rate="40"
        )
    [point] = found.points
    assert point.completed == point.requests
    assert point.requests in range(16, 25, 4)  # 0.5 s at 40 requests/s, in whole bursts
    assert found.arrivals == "recorded"
