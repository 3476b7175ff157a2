"""ProcessClient over the life of its engine: loading, steps, what it says, and its death."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from functools import partial

import pytest

from engine.errors import EngineDeadError
from engine.process import ToServer
from engine.protocol import EngineStats, Fatal, Notice, Progress, StepOutputs
from tests.unit.client_rig import READY, Client, read, token


@pytest.mark.parametrize(
    ("code", "fatal", "reason"),
    [
        (-9, None, "killed by signal 9, likely out of memory; lower --max-model-len"),
        (-11, None, "killed by signal 11"),
        (3, None, "exited with status 3"),
        (3, Fatal("The engine failed: KeyError."), "KeyError"),
    ],
)
async def test_death_fails_every_stream_with_its_reason(
    client: Client, code: int, fatal: Fatal | None, reason: str
) -> None:
    """Reliability T-01: those that wait and those that come later."""
    streams = [client.submit_prompts(1)[0] for _ in range(3)]
    readers = [asyncio.ensure_future(read(stream)) for stream in streams]
    watcher = asyncio.ensure_future(client.wait_dead())
    await asyncio.sleep(0)
    if fatal:
        client._on_message(fatal)
    client.die(code)
    for reader in readers:
        with pytest.raises(EngineDeadError, match=reason):
            await reader
    assert reason in str(await watcher)
    assert client.state == "dead"
    assert not client.busy
    assert client.endpoint.closed
    with pytest.raises(EngineDeadError, match=reason):
        client.submit_prompts(1)
    with pytest.raises(EngineDeadError, match=reason):
        await client.wait_ready()
    for stream in streams:
        stream.close()  # must not send to a dead engine: the endpoint refuses
    client.die(0)
    assert reason in str(await client.wait_dead()), "the first reason stays"


async def test_the_reason_may_come_after_the_news_of_the_end(client: Client) -> None:
    words = Fatal("config.json has no vocab_size.", config_error=True)
    late = Progress("loading weights", 0.5), words
    client.endpoint.late = [partial(client._on_message, message) for message in late]
    client.die(2)
    with pytest.raises(EngineDeadError, match="no vocab_size"):
        await client.wait_ready()
    assert client.config_error


async def test_an_engine_that_has_told_why_and_then_aborts(client: Client) -> None:
    """As where CUDA has failed: what takes its memory down behind the report calls abort()."""
    words = Fatal("The engine failed: AcceleratorError.")
    client.endpoint.late = [partial(client._on_message, words)]
    client.die(-6)
    with pytest.raises(EngineDeadError, match="AcceleratorError"):
        await client.wait_ready()


async def test_nothing_is_taken_behind_a_message_that_was_lost(client: Client) -> None:
    """Or an answer with a hole would end as if all were well (T-39)."""
    stream, [request_id] = client.submit_prompts(3)
    client.step(token(request_id, 1))
    client._on_message(Fatal("A message of the engine was lost or cannot be read."))
    client.step(token(request_id, 3, "stop"))
    client.die(-9)
    with pytest.raises(EngineDeadError, match="was lost"):
        await read(stream)


async def test_an_engine_that_reports_its_end_is_ended(client: Client) -> None:
    """It would end by itself, but not where the message stands for one that nobody could read."""
    assert not client.child.killed
    client._on_message(Fatal("The engine sent a message that cannot be read."))
    assert client.child.killed


async def test_what_failed_in_the_engine_is_a_record_of_the_log(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    traceback = "Traceback (most recent call last):\n  File ...\nKeyError: 7\n"
    client._on_message(Fatal("The engine failed: KeyError.", traceback))
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert logging.Formatter().format(record).endswith(traceback.rstrip())


async def test_what_the_engine_logs_is_a_record_of_the_log(
    client: Client, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """From a logger of the engine process to the server's log."""
    sent: list[Notice] = []
    logger = logging.Logger("engine.somewhere", logging.INFO)
    logger.addHandler(ToServer(sent.append))
    logger.warning("no memory to capture more steps: %s", "100 % held")
    logger.debug("nobody wants to know")
    other = threading.Thread(target=logger.warning, args=("the socket is not mine",))
    other.start()
    other.join()
    (notice,) = sent
    client._on_message(notice)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == "no memory to capture more steps: 100 % held"
    assert capsys.readouterr().err == "the socket is not mine\n"


async def test_a_configuration_error_is_told_apart(client: Client) -> None:
    client._on_message(Fatal("No such model.", config_error=True))
    client.die(2)
    assert client.config_error
    with pytest.raises(EngineDeadError, match="No such model"):
        await client.wait_ready()


async def test_loading_is_told_step_by_step() -> None:
    client = Client()
    client.state, client.info = "loading", None
    client._ready.clear()
    client._on_message(Progress("loading weights", 0.5))
    assert client.progress == Progress("loading weights", 0.5)
    waiting = asyncio.ensure_future(client.wait_ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    client._on_message(READY)
    assert await waiting is READY
    assert client.state == "ready"
    assert client.progress == Progress("ready", 1.0)


async def test_the_age_of_the_last_step_counts_only_while_there_is_work(client: Client) -> None:
    client._last_sign = time.monotonic() - 1000
    assert client.last_step_age() == 0
    stream, _ = client.submit_prompts(1)
    assert client.last_step_age() < 500, "an idle engine owed no sign"
    client._last_sign = time.monotonic() - 1000
    client.submit_prompts(1)
    assert client.last_step_age() >= 1000, "but one with work does"
    client.step()
    assert client.last_step_age() < 500
    stream.close()


async def test_every_step_is_shown_to_the_metrics(client: Client) -> None:
    seen: list[StepOutputs] = []
    client.on_step = seen.append
    client.step(stats=EngineStats(step=7))
    assert client.stats.step == 7
    assert [outputs.stats.step for outputs in seen] == [7]


async def test_ids_are_never_used_twice(client: Client) -> None:
    ids = [client.next_id() for _ in range(1000)]
    assert ids == sorted(set(ids))
