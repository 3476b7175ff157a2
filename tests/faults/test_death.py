"""Processes that die, hang or get a signal: which clients see it, how soon, and the cleanup."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import psutil
import pytest

from engine.client.client import ProcessClient
from engine.config import EngineConfig
from engine.errors import EngineDeadError
from engine.protocol.generate import GenerateRequest, SamplingParams
from engine.protocol.ready import DUMP_STACKS
from engine.protocol.wire import FromEngine
from server import exit_codes
from server.cli.lifetime import ECHO_S
from server.cli.serve import LONGEST_TMPDIR
from tests.faults.test_drain import half_sent
from tests.support.process import START_S, eventually
from tests.support.prometheus import metric
from tests.support.serve import Case, Server, check, complete, greedy, serving, starting

Record = Callable[[str, object], None]
SEEN_S = 1.0  # promise: every stream and /health report the engine's death
GONE_S = 5.0  # promise: no process outlives the API process
SLACK = 3  # factor by which a busy machine may exceed a promise
LONG = {"max_tokens": 500, "ignore_eos": True, "temperature": 0}


def note(record: Record, name: str, seconds: float, promised: float) -> None:
    """Add a measured time to the test's report, and check it against the promise."""
    record(name, round(seconds, 3))
    print(f"\n{name}: {seconds:.3f} s, promised {promised:g} s")
    assert seconds < promised * SLACK


async def health(http: httpx2.AsyncClient, path: str = "/health") -> tuple[int, str]:
    response = await http.get(path)
    return response.status_code, response.json()["status"]


async def until(condition: Callable[[], bool], what: str) -> None:
    await asyncio.to_thread(eventually, condition, what)


# ---- the engine dies ------------------------------------------------------------------------


async def counted(items: AsyncIterable[Any], begun: asyncio.Semaphore) -> AsyncIterator[Any]:
    """Yield all items; release `begun` at the first one."""
    first = True
    async for item in items:
        if first:
            begun.release()
            first = False
        yield item


async def read_raw(http: httpx2.AsyncClient, begun: asyncio.Semaphore) -> str:
    """Return the text that a plain HTTP client reads of a failing stream; the body must end."""
    text = ""
    body = {"prompt": "Once upon a time", "stream": True, **LONG}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in counted(response.aiter_lines(), begun):
            text += line + "\n"
    return text


async def read_sdk(sdk: openai.AsyncOpenAI, begun: asyncio.Semaphore) -> openai.APIError:
    """Return the error that the OpenAI client raises in the middle of a stream."""
    stream = await sdk.completions.create(
        model="tale", prompt="Lily and Ben", stream=True, max_tokens=500, extra_body=LONG
    )
    with pytest.raises(openai.APIError) as caught:
        [chunk async for chunk in counted(stream, begun)]
    return caught.value


async def timed(work: Any) -> tuple[Any, float]:
    result = await work
    return result, time.monotonic()


async def first_failure(http: httpx2.AsyncClient) -> tuple[float, str]:
    """Return the time at which /health began to fail, and the status it reported."""
    while True:
        code, status = await health(http)
        if code != 200:
            assert code == 503
            return time.monotonic(), status
        await asyncio.sleep(0.01)


async def test_killed_engine_ends_every_stream_with_error(
    llama: Path, record_property: Record
) -> None:
    # With drafts, the first streams may end before all run.
    with serving(llama, "--served-model-name", "tale", "--speculation", "off") as server:
        begun = asyncio.Semaphore(0)
        url = f"{server.base_url}/v1"
        async with (
            server.http() as http,
            openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as sdk,
        ):
            raw = [asyncio.create_task(timed(read_raw(http, begun))) for _ in range(8)]
            typed = [asyncio.create_task(timed(read_sdk(sdk, begun))) for _ in range(8)]
            for _ in range(16):
                await begun.acquire()
            body = {"prompt": "The big", "n": 8, **LONG}
            whole = [
                asyncio.create_task(timed(http.post("/v1/completions", json=body)))
                for _ in range(2)
            ]
            await until(lambda: server.metric("num_requests_running") == 32, "32 run")
            server.engine.kill()
            killed = time.monotonic()
            failed_at, status = await first_failure(http)
            late = await http.post("/v1/completions", json=body)
            ends = []
            for text, at in await asyncio.gather(*raw):
                *_, last = text.strip().split("\n\n")
                error = json.loads(last.removeprefix("data: "))["error"]
                assert (error["type"], error["code"]) == ("server_error", "engine_unavailable")
                assert "[DONE]" not in text
                ends.append(at)
            for error, at in await asyncio.gather(*typed):
                assert error.code == "engine_unavailable"
                ends.append(at)
            for response, at in await asyncio.gather(*whole):
                assert response.status_code == 503
                assert response.json()["error"]["code"] == "engine_unavailable"
                ends.append(at)
        assert status == "dead"
        assert late.status_code == 503
        assert late.json()["error"]["code"] == "engine_unavailable"
        assert server.status() == exit_codes.ENGINE_DIED
        exited = time.monotonic()
        assert server.last_line.startswith("penstock: The engine process was killed by signal 9")
        assert "Traceback" not in server.log
        assert list(server.temp.iterdir()) == []
    note(record_property, "streams_ended_after", max(ends) - killed, SEEN_S)
    note(record_property, "health_503_after", failed_at - killed, SEEN_S)
    note(record_property, "process_exited_after", exited - killed, GONE_S)


@pytest.mark.slow
async def test_engine_killed_while_loading_ends_server(llama: Path) -> None:
    with starting(llama) as server:
        server.wait_for("listening on")
        eventually(lambda: server.children, "the engine process is there").pop().kill()
        assert server.status() == exit_codes.ENGINE_DIED
        assert server.last_line.startswith("penstock: The engine process was killed by signal 9")
        assert list(server.temp.iterdir()) == []


@contextlib.asynccontextmanager
async def engine_process(model: Path, **fields: Any) -> AsyncIterator[ProcessClient]:
    client = ProcessClient(EngineConfig(model=str(model), threads=1, **fields))
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


async def test_engine_killed_at_start_raises_engine_dead_error(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started_and_killed(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        process = popen(*args, **options)
        process.kill()
        child = psutil.Process(process.pid)
        eventually(lambda: child.status() == psutil.STATUS_ZOMBIE, "it has ended")
        return process

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", started_and_killed)
    async with engine_process(llama) as client:
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            await client.wait_ready()


def stand_still_until_it_is_gone(client: ProcessClient) -> None:
    """Block the event loop, so that all events of the engine's end arrive at once."""
    assert client.pid is not None
    eventually(lambda: not psutil.pid_exists(client.pid or 0), "the engine has ended", START_S)


async def test_engine_that_exits_with_config_error_reports_it_as_cause(llama: Path) -> None:
    async with engine_process(llama, max_model_len=4096) as client:
        await asyncio.sleep(0.1)  # let the tasks that `start` scheduled run
        stand_still_until_it_is_gone(client)
        with pytest.raises(EngineDeadError, match="--max-model-len 4096 is more than the 512"):
            await client.wait_ready()
        assert client.config_error


@pytest.mark.slow
async def test_submit_to_engine_not_yet_known_to_be_dead_raises(llama: Path) -> None:
    async with engine_process(llama) as client:
        await client.wait_ready()
        psutil.Process(client.pid).kill()
        stand_still_until_it_is_gone(client)
        params = SamplingParams(max_tokens=3)
        left, kept = (
            client.submit([GenerateRequest(client.next_id(), [1, 2], params, time.monotonic())])
            for _ in range(2)
        )
        left.close()
        with pytest.raises(EngineDeadError, match="killed by signal 9"):
            [batch async for batch in kept]


# ---- the API process dies -------------------------------------------------------------------


@pytest.mark.parametrize("load", [pytest.param(0, marks=pytest.mark.slow), 8])
async def test_killed_api_process_leaves_no_engine_or_files(
    load: int, llama: Path, record_property: Record
) -> None:
    with serving(llama) as server:
        engine = server.engine
        async with server.http() as http:
            body = {"prompt": "Tim", "n": 4, **LONG}
            requests = [
                asyncio.create_task(http.post("/v1/completions", json=body)) for _ in range(load)
            ]
            await until(lambda: server.metric("num_requests_running") == 4 * load, "all run")
            server.process.kill()
            killed = time.monotonic()
            await until(lambda: not alive(engine), "the engine is gone")
            gone = time.monotonic()
            for error in await asyncio.gather(*requests, return_exceptions=True):
                assert isinstance(error, httpx2.TransportError)
        assert list(server.temp.iterdir()) == []
    note(record_property, "engine_gone_after", gone - killed, GONE_S)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


# ---- the engine hangs -----------------------------------------------------------------------


@pytest.mark.slow
async def test_hung_engine_is_killed_and_its_requests_fail(llama: Path) -> None:
    with serving(llama, "--stall-timeout", "2") as server:
        begun = asyncio.Semaphore(0)
        async with server.http() as http:
            server.engine.suspend()
            await asyncio.sleep(4)
            assert await health(http) == (200, "ok"), "an idle engine sends no steps"
            server.engine.resume()
            stream = asyncio.create_task(read_raw(http, begun))
            await begun.acquire()
            server.engine.suspend()
            stopped = time.monotonic()
            whole = asyncio.create_task(http.post("/v1/completions", json={"prompt": "Tim"}))
            failed_at, status = await first_failure(http)
            assert status == "dead"
            assert failed_at - stopped > 1.4, "the engine's last message may be a little older"
            assert "engine_unavailable" in await stream
            refused = await whole
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "engine_unavailable"
        assert server.status() == exit_codes.ENGINE_DIED
        assert "sent nothing for 2 s (--stall-timeout" in server.last_line
        await until(lambda: not alive(server.engine), "the engine is gone")


@pytest.mark.slow
async def test_hung_engine_is_noticed_after_all_clients_have_given_up(llama: Path) -> None:
    with serving(llama, "--stall-timeout", "4") as server:
        async with server.http() as http:
            server.engine.suspend()
            for _ in range(3):
                with pytest.raises(httpx2.ReadTimeout):
                    await http.post("/v1/completions", json={"prompt": "Tim"}, timeout=0.5)
            _, status = await first_failure(http)
            assert status == "dead"
        assert server.status() == exit_codes.ENGINE_DIED
        assert "sent nothing for 4 s (--stall-timeout" in server.last_line


@pytest.mark.slow
async def test_requests_that_wait_for_hung_engine_are_counted(
    llama: Path, stories: list[Case]
) -> None:
    """Otherwise a load balancer would take this replica for the emptiest and send it more."""
    with serving(llama, "--dtype", "float32") as server:
        async with server.http() as http:

            async def waiting(expected: int) -> bool:
                await asyncio.sleep(0.05)
                told = (await http.get("/ready")).json()["waiting"]
                text = (await http.get("/metrics")).text
                return {told, metric(text, "num_requests_waiting")} == {expected}

            server.engine.suspend()
            crowd = [asyncio.create_task(complete(http, greedy(stories[0]))) for _ in range(8)]
            gone = asyncio.create_task(complete(http, greedy(stories[0])))
            async with asyncio.timeout(START_S):
                while not await waiting(9):
                    pass
                gone.cancel()
                while not await waiting(8):
                    pass
            server.engine.resume()
            for answer in crowd:
                check(await answer, stories[0])
            assert await waiting(0)


@pytest.mark.slow
async def test_server_suspended_together_with_its_engine_continues(
    llama: Path, stories: list[Case]
) -> None:
    """As with Ctrl-Z or a paused container: time has passed, but the engine did not hang."""
    with serving(llama, "--dtype", "float32", "--stall-timeout", "2") as server:
        async with server.http() as http:
            server.engine.suspend()
            answer = asyncio.create_task(complete(http, greedy(stories[0], stream=True)))
            await asyncio.sleep(0.5)
            server.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(6)
            server.process.send_signal(signal.SIGCONT)
            server.engine.resume()
            check(await answer, stories[0])
            assert await health(http) == (200, "ok")


@pytest.mark.slow
async def test_engine_writes_thread_stacks_on_signal(llama: Path) -> None:
    """A busy engine cannot answer messages, but it can write the stacks of its threads."""
    with serving(llama, "--dtype", "float32") as server:
        server.engine.send_signal(DUMP_STACKS)
        await until(lambda: "in turn" in server.log, "the engine's stack, in its loop")
        async with server.http() as http:
            assert await health(http) == (200, "ok")


# ---- signals --------------------------------------------------------------------------------


async def test_sigterm_lets_accepted_requests_finish(
    llama: Path, stories: list[Case], record_property: Record
) -> None:
    """32 requests run and 32 wait when the signal arrives."""
    with serving(llama, "--dtype", "float32", "--max-num-seqs", 32) as server:
        async with server.http() as http:
            crowd = [stories[i % len(stories)].after(i % 8, most=99) for i in range(64)]
            accepted = [
                asyncio.create_task(complete(http, greedy(case, stream=i % 3 != 0)))
                for i, case in enumerate(crowd)
            ]
            await until(lambda: server.metric("num_requests_waiting") >= 30, "32 run, 32 wait")
            server.signal(signal.SIGTERM)
            told = time.monotonic()
            while await health(http, "/ready") != (503, "draining"):
                pass
            note(record_property, "signal_to_not_ready", time.monotonic() - told, SEEN_S)
            assert await health(http) == (200, "draining")
            late = await http.post("/v1/completions", json={"prompt": "Hi"})
            assert (late.status_code, late.headers["connection"]) == (503, "close")
            assert late.json()["error"]["code"] == "shutting_down"
            assert "retry-after" in late.headers
            for answer, case in zip(await asyncio.gather(*accepted), crowd, strict=True):
                check(answer, case)
            last = time.monotonic()
        assert await asyncio.to_thread(server.status) == exit_codes.CLEAN
        note(record_property, "last_answer_to_exit", time.monotonic() - last, 1.0)
        assert list(server.temp.iterdir()) == []


@pytest.mark.parametrize("hung", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
async def test_drain_timeout_ends_requests_with_shutting_down_error(
    llama: Path, hung: bool, record_property: Record
) -> None:
    with serving(llama, "--drain-timeout", "0.2") as server:
        begun = asyncio.Semaphore(0)
        async with server.http() as http:
            body = {"prompt": "Tim", **LONG, "n": 16}
            whole = asyncio.create_task(http.post("/v1/completions", json=body))
            stream = asyncio.create_task(read_raw(http, begun))
            await begun.acquire()
            if hung:
                server.engine.suspend()
            with half_sent(server):
                server.signal(signal.SIGTERM)
                told = time.monotonic()
                text = await stream
                response = await whole
                assert await asyncio.to_thread(server.status) == exit_codes.CLEAN
        note(record_property, "drain_timeout_to_exit", time.monotonic() - told - 0.2, 2.0)
        assert '"code":"shutting_down"' in text
        assert "[DONE]" not in text
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"


@pytest.mark.slow
async def test_second_sigterm_exits_at_once(llama: Path, record_property: Record) -> None:
    with serving(llama) as server:
        engine = server.engine
        async with server.http() as http:
            body = {"prompt": "Tim", **LONG, "n": 16}
            request = asyncio.create_task(http.post("/v1/completions", json=body))
            await until(lambda: server.metric("num_requests_running") == 16, "16 run")
            server.signal(signal.SIGTERM)
            await until(lambda: "SIGTERM" in server.log, "the first signal has arrived")
            await asyncio.sleep(ECHO_S)
            server.signal(signal.SIGTERM)
            again = time.monotonic()
            assert await asyncio.to_thread(server.status) == 128 + signal.SIGTERM
            exited = time.monotonic()
            await until(lambda: not alive(engine), "the engine is gone")
            with pytest.raises(httpx2.TransportError):
                await request
    note(record_property, "second_signal_to_exit", exited - again, 1.0)


@pytest.fixture
def loading(llama: Path) -> Iterator[Server]:
    with starting(llama) as server:
        server.wait_for("penstock: listening")
        yield server


@pytest.mark.slow
def test_sigterm_while_loading_exits_cleanly(loading: Server, record_property: Record) -> None:
    engine = eventually(lambda: loading.children, "the engine process is there")[0]
    loading.signal(signal.SIGTERM)
    told = time.monotonic()
    assert loading.status() == exit_codes.CLEAN
    note(record_property, "exit_while_loading", time.monotonic() - told, 3.0)
    eventually(lambda: not alive(engine), "the engine is gone")
    assert list(loading.temp.iterdir()) == []
    assert "Traceback" not in loading.log


@pytest.mark.slow
async def test_socket_files_are_removed_before_engine_is_ready(
    llama: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large models load for minutes; a SIGKILL in that time would leave the files for ever."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("t")))
    take, stages = ProcessClient._on_message, dict[str, list[Path]]()

    def taken(client: ProcessClient, message: FromEngine) -> None:
        take(client, message)
        stages[client.progress.stage] = list(Path(tempfile.gettempdir()).iterdir())

    monkeypatch.setattr(ProcessClient, "_on_message", taken)
    async with engine_process(llama) as client:
        await client.wait_ready()
    assert next(iter(stages)) == "starting", "before torch is imported"
    del stages["ready"]
    assert [] in stages.values()


@pytest.mark.parametrize("later", [0, 0.05, 0.2])
def test_sigkill_during_start_leaves_no_engine_or_files(later: float, llama: Path) -> None:
    with starting(llama) as server:
        engine = eventually(lambda: server.children, "the engine process is there")[0]
        time.sleep(later)
        server.signal(signal.SIGKILL)
        eventually(lambda: not alive(engine), "the engine is gone")
        assert list(server.temp.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_during_start_leaves_no_engine_or_files(number: signal.Signals, llama: Path) -> None:
    """The engine starts while the server still imports its own modules."""
    with starting(llama) as server:
        engine = eventually(lambda: server.children, "the engine process is there")[0]
        server.signal(number)
        assert server.status() != exit_codes.CLEAN or "listening" in server.log
        eventually(lambda: not alive(engine), "the engine is gone")
        assert list(server.temp.iterdir()) == []
        assert "Traceback" not in server.log


@pytest.mark.slow
def test_invalid_chat_template_leaves_no_engine_or_files(llama: Path, tmp_path: Path) -> None:
    template = tmp_path / "broken.jinja"
    template.write_text("{% if %}")
    with starting(llama, "--chat-template", template) as server:
        engine = eventually(lambda: server.children, "the engine process is there")[0]
        assert server.status() == exit_codes.BAD_CONFIG
        assert "broken.jinja" in server.last_line
        assert not alive(engine)
        assert list(server.temp.iterdir()) == []


@pytest.mark.slow
def test_tmpdir_too_long_for_socket_path_is_refused(llama: Path) -> None:
    with tempfile.TemporaryDirectory() as short:
        deep = Path(short, "d" * (LONGEST_TMPDIR - len(short) - 1))
        deeper = Path(f"{deep}d")
        deep.mkdir()
        deeper.mkdir()
        with starting(llama, env={"TMPDIR": str(deep)}) as server:
            server.wait_ready()
        with starting(llama, env={"TMPDIR": str(deeper)}) as server:
            assert server.status() == exit_codes.BAD_CONFIG
            assert f"allows {LONGEST_TMPDIR} bytes" in server.last_line
            assert "Set TMPDIR to a folder with a shorter name" in server.last_line
