"""ProcessClient during the life of its engine: loading, steps, log messages and death."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from functools import partial

import pytest

from engine.client import client as client_module
from engine.config import EngineConfig
from engine.errors import EngineDeadError, EngineUnavailableError
from engine.process import ToServer
from engine.protocol.failure import Fatal, Notice
from engine.protocol.generate import Abort, CacheLookup
from engine.protocol.lens import LensRequest, LensResult
from engine.protocol.outputs import EngineStats, StepOutputs
from engine.protocol.ready import Progress
from engine.protocol.watch import Blocks, QueueState
from tests.support.client_rig import READY, Client, read, token


@pytest.mark.parametrize(
    ("code", "fatal", "reason"),
    [
        (-9, None, "killed by signal 9, likely out of memory; lower --max-model-len"),
        (-11, None, "killed by signal 11"),
        (3, None, "exited with status 3"),
        (3, Fatal("The engine failed: KeyError."), "KeyError"),
    ],
)
async def test_client_engine_dies_every_stream_fails_with_the_reason(
    client: Client, code: int, fatal: Fatal | None, reason: str
) -> None:
    """Requests that are running fail, and so do later ones."""
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
        stream.close()  # must not send to a dead engine: the fake endpoint would fail
    client.die(0)
    assert reason in str(await client.wait_dead()), "a later exit must not replace the reason"


async def test_client_reason_after_exit_is_still_reported(client: Client) -> None:
    words = Fatal("config.json has no vocab_size.", config_error=True)
    late = Progress("loading weights", 0.5), words
    client.endpoint.late = [partial(client._on_message, message) for message in late]
    client.die(2)
    with pytest.raises(EngineDeadError, match="no vocab_size"):
        await client.wait_ready()
    assert client.config_error


async def test_client_engine_aborts_after_fatal_reports_the_reason(client: Client) -> None:
    """After a CUDA failure the engine sends Fatal, and CUDA's cleanup then calls abort()."""
    words = Fatal("The engine failed: AcceleratorError.")
    client.endpoint.late = [partial(client._on_message, words)]
    client.die(-6)
    with pytest.raises(EngineDeadError, match="AcceleratorError"):
        await client.wait_ready()


async def test_client_outputs_after_a_lost_message_are_ignored(client: Client) -> None:
    """Otherwise an answer with a gap would end as if it were complete."""
    stream, [request_id] = client.submit_prompts(3)
    client.step(token(request_id, 1))
    client._on_message(Fatal("An engine message was lost or cannot be decoded."))
    client.step(token(request_id, 3, "stop"))
    client.die(-9)
    with pytest.raises(EngineDeadError, match="was lost"):
        await read(stream)


async def test_client_fatal_message_kills_the_engine(client: Client) -> None:
    """The engine ends by itself, unless the client created Fatal for an unreadable message."""
    assert not client.child.killed
    client._on_message(Fatal("An engine message was lost or cannot be decoded."))
    assert client.child.killed


async def test_client_fatal_detail_is_logged_as_traceback(
    client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    traceback = "Traceback (most recent call last):\n  File ...\nKeyError: 7\n"
    client._on_message(Fatal("The engine failed: KeyError.", traceback))
    (record,) = caplog.records
    assert record.levelname == "ERROR"
    assert logging.Formatter().format(record).endswith(traceback.rstrip())


async def test_client_engine_log_record_reaches_the_server_log(
    client: Client, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record goes from a logger of the engine process to the server's log."""
    sent: list[Notice] = []
    logger = logging.Logger("engine.somewhere", logging.INFO)
    logger.addHandler(ToServer(sent.append))
    logger.warning("no memory to capture more steps: %s", "100 % held")
    logger.debug("below the level")
    other = threading.Thread(target=logger.warning, args=("the socket is not mine",))
    other.start()
    other.join()
    (notice,) = sent
    client._on_message(notice)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == "no memory to capture more steps: 100 % held"
    assert capsys.readouterr().err == "the socket is not mine\n"


async def test_client_config_error_is_distinguished(client: Client) -> None:
    client._on_message(Fatal("No such model.", config_error=True))
    client.die(2)
    assert client.config_error
    with pytest.raises(EngineDeadError, match="No such model"):
        await client.wait_ready()


async def test_client_loading_reports_progress_until_ready() -> None:
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


async def test_last_step_age_counts_only_while_there_is_work(client: Client) -> None:
    client._last_sign = time.monotonic() - 1000
    assert client.last_step_age() == 0
    stream, _ = client.submit_prompts(1)
    assert client.last_step_age() < 500, "an idle engine sends nothing"
    client._last_sign = time.monotonic() - 1000
    client.submit_prompts(1)
    assert client.last_step_age() >= 1000, "an engine with work must send"
    client.step()
    assert client.last_step_age() < 500
    stream.close()


async def test_client_step_listeners_get_every_step(client: Client) -> None:
    seen: list[StepOutputs] = []
    client.step_listeners.append(seen.append)
    client.step(stats=EngineStats(step=7))
    assert client.stats.step == 7
    assert [outputs.stats.step for outputs in seen] == [7]


async def test_client_cache_lookups_get_their_own_answers(client: Client) -> None:
    waiting = [asyncio.ensure_future(client.num_cached([1, 2], salt)) for salt in "ab"]
    await asyncio.sleep(0)
    first, second = client.endpoint.sent
    assert isinstance(first, CacheLookup)
    assert (first.prompt, first.salt) == ([1, 2], "a")
    waiting[0].cancel()
    await asyncio.sleep(0)
    answers = {first.id: 1, second.id: 2}
    client._on_message(StepOutputs(1.0, [], [], EngineStats(), lookups=answers))
    assert await waiting[1] == 2
    assert not client._lookups


async def test_client_cache_lookup_fails_without_an_engine(client: Client) -> None:
    waiting = asyncio.ensure_future(client.num_cached([1], ""))
    await asyncio.sleep(0)
    client.die(-9)
    with pytest.raises(EngineDeadError, match="signal 9"):
        await waiting
    with pytest.raises(EngineDeadError, match="signal 9"):
        await client.num_cached([1], "")
    loading = Client()
    loading.info = None
    with pytest.raises(EngineUnavailableError, match="try again"):
        await loading.num_cached([1], "")


async def test_client_lenses_get_their_own_answers(client: Client) -> None:
    waiting = [asyncio.ensure_future(client.look(LensRequest(n, [n]))) for n in (1, 2)]
    await asyncio.sleep(0)
    assert client.endpoint.sent == [LensRequest(1, [1]), LensRequest(2, [2])]
    client._on_message(LensResult(2, error="busy"))
    client._on_message(LensResult(3))
    assert (await waiting[1]).error == "busy"
    assert not waiting[0].done()
    waiting[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[0]
    assert client.endpoint.sent[2:] == [Abort([1])]
    client._on_message(LensResult(1))
    assert not client._lookups


async def test_client_lens_fails_with_the_engine(client: Client) -> None:
    waiting = asyncio.ensure_future(client.look(LensRequest(1, [1])))
    await asyncio.sleep(0)
    client.die(-9)
    with pytest.raises(EngineDeadError, match="signal 9"):
        await waiting


async def test_client_watcher_gets_the_end_of_the_engine(client: Client) -> None:
    seen: list[object] = []
    client.watch(seen.append)
    client.die(-9)
    client.watch(None)
    client.watch(seen.append)
    assert [type(message) for message in seen] == [EngineDeadError] * 2


def make_impatient(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the client take its engine for hung after 0.05 s of silence."""
    monkeypatch.setattr(client_module, "POLL_S", 0.01)
    client.config = EngineConfig(stall_timeout=0.05)
    client.child.send_signal = lambda number: None
    client._loop = asyncio.get_running_loop()


@pytest.mark.parametrize(
    "kind", ["closed stream", "cancelled lookup", "unload adapter", "end of watch"]
)
async def test_client_engine_that_confirms_no_message_is_hung(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Clients give up before --stall-timeout, so only their aborts are left."""
    make_impatient(client, monkeypatch)
    if kind == "closed stream":
        client.submit_prompts(1)[0].close()
    elif kind == "cancelled lookup":
        waiting = asyncio.ensure_future(client.num_cached([1], ""))
        await asyncio.sleep(0)
        waiting.cancel()
    elif kind == "unload adapter":
        client.unload_adapter(1)
    else:
        client.watch(None)
    assert client.last_step_age() > 0
    await asyncio.wait_for(client._watch_for_hang(), 5)
    assert client.state == "dead"


async def test_client_engine_that_has_confirmed_the_abort_may_be_silent(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_impatient(client, monkeypatch)
    client.submit_prompts(1, 2)[0].close()
    client.step()  # it has taken both requests and the abort
    assert client.last_step_age() == 0
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client._watch_for_hang(), 0.3)


@pytest.mark.parametrize("kind", ["lookup", "lens", "watch"])
async def test_client_engine_that_answers_no_question_is_hung(
    client: Client, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Nothing else would end the wait: a question is no request, and has no stream."""
    make_impatient(client, monkeypatch)
    seen: list[object] = []
    waiting: asyncio.Future[object] | None = None
    if kind == "lookup":
        waiting = asyncio.ensure_future(client.num_cached([1], ""))
    elif kind == "lens":
        waiting = asyncio.ensure_future(client.look(LensRequest(1, [1])))
    else:
        client.watch(seen.append)
    await asyncio.wait_for(client._watch_for_hang(), 5)
    if waiting is not None:
        with pytest.raises(EngineDeadError, match="hung"):
            await waiting
    else:
        assert [type(message) for message in seen] == [EngineDeadError]
    assert client.state == "dead"


async def test_client_engine_that_has_answered_all_questions_may_be_silent(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_impatient(client, monkeypatch)
    watch_id = client.watch(lambda message: None)
    client._on_message(Blocks(watch_id, [], [], QueueState(), EngineStats()))
    lookup = asyncio.ensure_future(client.num_cached([1], ""))
    await asyncio.sleep(0)
    [*_, sent] = client.endpoint.sent
    assert isinstance(sent, CacheLookup)
    found = {sent.id: 1}
    client._on_message(StepOutputs(1.0, [], [], EngineStats(), lookups=found, num_handled=2))
    await lookup
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client._watch_for_hang(), 0.3)


async def test_client_next_id_is_never_reused(client: Client) -> None:
    ids = [client.next_id() for _ in range(1000)]
    assert ids == sorted(set(ids))
