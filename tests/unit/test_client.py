"""ProcessClient without a process: admission, routing, and streams that end as they should."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
import time
from typing import Any

import pytest

from engine.child import _with_huge_pages
from engine.client import OutputStream, ProcessClient
from engine.config import EngineConfig
from engine.errors import (
    EngineDeadError,
    EngineOverloadedError,
    EngineUnavailableError,
    RequestRejectedError,
)
from engine.process import ToServer
from engine.protocol import (
    Abort,
    Admission,
    EmbedRequest,
    EngineStats,
    Fatal,
    GenerateRequest,
    Notice,
    Progress,
    Ready,
    Rejected,
    SamplingParams,
    StepOutputs,
    ToEngine,
    TokenOutput,
)

READY = Ready(
    "Llama", "decoder", "float32", "cpu", 512, 256, 64, 9, 8, 64, 1, 1, 1, 0.1, "torch", 1, ()
)


class FakeEndpoint:
    """Keeps what was sent to the engine."""

    def __init__(self) -> None:
        self.sent: list[ToEngine] = []
        self.closed = False

    def send(self, message: ToEngine) -> None:
        assert not self.closed
        self.sent.append(message)

    def receive(self, wait_s: float) -> bool:
        return False

    def close(self) -> None:
        self.closed = True

    @property
    def aborted(self) -> list[list[int]]:
        return [message.ids for message in self.sent if isinstance(message, Abort)]


class FakeChild:
    """The engine's process, of which there is only what the client does to it."""

    def __init__(self) -> None:
        self.endpoint = FakeEndpoint()
        self.process = self
        self.killed = self.sockets_removed = False

    def kill(self) -> None:
        self.killed = True

    def remove_sockets(self) -> None:
        self.sockets_removed = True

    def close(self) -> None:
        self.endpoint.close()


class Client(ProcessClient):
    """A client whose engine is the test."""

    def __init__(self, **config: Any) -> None:
        super().__init__(EngineConfig(**config))
        self.child: Any = FakeChild()
        self._child = self.child
        self._endpoint = self.endpoint = self.child.endpoint
        self._on_message(READY)

    def request(self, length: int = 3) -> GenerateRequest:
        return GenerateRequest(self.next_id(), [1] * length, SamplingParams(8), 0.0)

    def submit_prompts(self, *lengths: int) -> tuple[OutputStream, list[int]]:
        requests = [self.request(length) for length in lengths]
        return self.submit(requests), [request.id for request in requests]

    def step(
        self,
        *tokens: TokenOutput,
        admitted: tuple[int, ...] = (),
        at: float = 1.0,
        stats: EngineStats | None = None,
    ) -> None:
        admissions = [Admission(i, at, 0) for i in admitted]
        self._on_message(StepOutputs(at, list(tokens), admissions, stats or EngineStats()))

    def die(self, code: int) -> None:
        self._on_exit(code)


@pytest.fixture
async def client() -> Client:
    return Client(max_num_queued_reqs=3, max_num_queued_tokens=100)


def token(request_id: int, value: int, finish: Any = None) -> TokenOutput:
    return TokenOutput(request_id, value, finish)


async def read(stream: OutputStream) -> list[list[int]]:
    """The tokens of each batch, until the stream ends."""
    return [[output.token for _, output in batch] async for batch in stream]


# ---- admission --------------------------------------------------------------------------------


async def test_the_queue_is_bounded_by_requests(client: Client) -> None:
    for _ in range(3):
        client.submit_prompts(1)
    with pytest.raises(EngineOverloadedError, match="3 requests with 3 prompt tokens"):
        client.submit_prompts(1)
    with pytest.raises(EngineOverloadedError):
        client.admit(1)
    client.step(admitted=(2,))
    client.admit(1)


async def test_the_queue_is_bounded_by_tokens(client: Client) -> None:
    client.submit_prompts(60)
    client.admit(1, 40)
    with pytest.raises(EngineOverloadedError):
        client.admit(1, 41)
    client.step(admitted=(1,))
    client.admit(1, 100)


async def test_an_empty_queue_takes_any_one_submission(client: Client) -> None:
    _, ids = client.submit_prompts(70, 70, 70, 70)
    assert len(client.endpoint.sent) == 4
    with pytest.raises(EngineOverloadedError):
        client.admit(1)
    client.step(admitted=tuple(ids))
    client.submit_prompts(101)


async def test_a_submission_is_taken_whole_or_not_at_all(client: Client) -> None:
    client.submit_prompts(1)
    with pytest.raises(EngineOverloadedError):
        client.submit_prompts(1, 1, 1)
    assert len(client.endpoint.sent) == 1
    client.submit_prompts(1, 1)


async def test_the_texts_of_a_submission_wait_as_one_request(client: Client) -> None:
    def embed(*lengths: int) -> list[int]:
        texts = [EmbedRequest(client.next_id(), [1] * n, "mean", 0.0) for n in lengths]
        client.embed(texts)
        return [text.id for text in texts]

    first, second = embed(10, 10, 10, 10), embed(5, 5)
    embed(5)
    with pytest.raises(EngineOverloadedError, match="3 requests with 55 prompt tokens"):
        client.admit(1)
    client.step(admitted=tuple(first[:3]))
    with pytest.raises(EngineOverloadedError, match="3 requests with 25 prompt tokens"):
        embed(1)
    client.step(admitted=(first[3],))
    with pytest.raises(EngineOverloadedError, match="2 requests with 15 prompt tokens"):
        embed(86)
    embed(40, 40)
    client.step(admitted=tuple(second))
    client.admit(1)


@pytest.mark.parametrize("leave", ["admitted", "aborted", "refused"])
async def test_what_leaves_the_queue_makes_room_once(client: Client, leave: str) -> None:
    stream, (request_id,) = client.submit_prompts(90)
    client.submit_prompts(5)
    with pytest.raises(EngineOverloadedError):
        client.admit(1, 6)
    for _ in range(2):
        if leave == "admitted":
            client.step(admitted=(request_id,))
        elif leave == "refused":
            client._on_message(Rejected(request_id, "invalid_value", "no"))
        else:
            stream.close()
        client.admit(1, 95)
        with pytest.raises(EngineOverloadedError):
            client.admit(1, 96)


@pytest.mark.parametrize(
    ("step_seconds", "tokens", "expected"), [(0.0, 64, 1), (0.5, 10, 5), (30.0, 1, 48)]
)
async def test_retry_after_follows_the_pace_within_a_minute(
    client: Client, step_seconds: float, tokens: int, expected: int
) -> None:
    client.submit_prompts(100)
    client.step(stats=EngineStats(step_seconds=step_seconds, step_prefill_tokens=tokens))
    with pytest.raises(EngineOverloadedError) as refused:
        client.admit(1, 1)
    assert expected <= refused.value.retry_after <= min(math.ceil(expected * 1.25), 60)


async def test_only_a_ready_engine_is_given_work() -> None:
    client = Client()
    client.state = "loading"
    with pytest.raises(EngineUnavailableError) as refused:
        client.admit(1)
    assert refused.value.state == "loading"
    client.state = "ready"
    stream, (request_id,) = client.submit_prompts(1)
    client.drain()
    with pytest.raises(EngineUnavailableError) as refused:
        client.admit(1)
    assert refused.value.state == "draining"
    tokenised, (late,) = client.submit_prompts(1)  # it was admitted before the drain
    client.step(token(request_id, 5, "stop"), admitted=(request_id,))
    client.step(token(late, 6, "stop"), admitted=(late,))
    assert await read(stream) == [[5]], "what was accepted goes on"
    assert await read(tokenised) == [[6]]
    client.die(-9)
    client.drain()
    with pytest.raises(EngineDeadError):
        client.admit(1)


# ---- streams ----------------------------------------------------------------------------------


async def test_a_slow_reader_gets_everything_at_once(client: Client) -> None:
    stream, (a, b) = client.submit_prompts(1, 1)
    batches = aiter(stream)
    client.step(token(a, 1), token(b, 2), admitted=(a, b), at=1.0)
    client.step(token(a, 3), at=2.0)
    assert [(at, o.token) for at, o in await anext(batches)] == [(1.0, 1), (1.0, 2), (2.0, 3)]
    assert stream.admissions.keys() == {a, b}
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    assert not waiting.done()
    client.step(token(a, 4, "length"))
    assert [o.token for _, o in await waiting] == [4]
    client.step(token(b, 5, "stop"))
    assert await read(stream) == [[5]]
    assert not client.busy
    assert client.endpoint.aborted == []


async def test_a_reader_that_is_cancelled_loses_nothing(client: Client) -> None:
    stream, (request_id,) = client.submit_prompts(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.01):
            await anext(aiter(stream))
    client.step(token(request_id, 1), token(request_id, 2, "stop"))
    assert await read(stream) == [[1, 2]]


async def test_finishing_one_request_leaves_the_others(client: Client) -> None:
    stream, (a, b) = client.submit_prompts(1, 1)
    client.step(token(a, 1), token(b, 2))
    stream.finish(a)
    stream.finish(a)
    assert client.endpoint.aborted == [[a]]
    client.step(token(a, 9), token(b, 3, "stop"))  # sampled before the engine heard of it
    assert await read(stream) == [[1, 2, 3]]
    stream.finish(b)
    stream.close()
    assert client.endpoint.aborted == [[a]], "nothing is left to abort"


async def test_finishing_the_last_request_ends_a_waiting_reader(client: Client) -> None:
    stream, (request_id,) = client.submit_prompts(1)
    reader = asyncio.ensure_future(read(stream))
    await asyncio.sleep(0)
    stream.finish(request_id)
    assert await reader == []


async def test_close_aborts_what_is_unfinished_once(client: Client) -> None:
    stream, (a, b, c) = client.submit_prompts(1, 1, 1)
    client.step(token(b, 1, "stop"))
    stream.close()
    stream.close()
    stream.finish(a)
    assert client.endpoint.aborted == [[a, c]]
    assert not client.busy
    client.step(token(a, 9, "length"), token(c, 9))  # for nobody; must not fail


async def test_a_refused_request_fails_its_submission_alone(client: Client) -> None:
    stream, (a, b) = client.submit_prompts(1, 1)
    bystander, (other,) = client.submit_prompts(1)
    client.step(token(a, 1))
    client._on_message(Rejected(b, "context_length_exceeded", "too long"))
    batches = aiter(stream)
    assert [o.token for _, o in await anext(batches)] == [1], "what came before is delivered"
    with pytest.raises(RequestRejectedError, match="too long") as refused:
        await anext(batches)
    assert refused.value.code == "context_length_exceeded"
    stream.close()
    assert a in client.endpoint.aborted[0]
    client.step(token(other, 7, "stop"))
    assert await read(bystander) == [[7]]


# ---- life and death ---------------------------------------------------------------------------


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
    client.child.sockets_removed = False
    client._ready.clear()
    client._on_message(Progress("loading weights", 0.5))
    assert client.progress == Progress("loading weights", 0.5)
    waiting = asyncio.ensure_future(client.wait_ready())
    await asyncio.sleep(0)
    assert not waiting.done()
    client._on_message(READY)
    assert await waiting is READY
    assert client.state == "ready"
    # The socket files are gone: both ends are connected, and nothing else may connect.
    assert client.child.sockets_removed


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


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": ""}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.check=3"}, "glibc.malloc.check=3:glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
    ],
)
def test_the_engine_gets_huge_pages_unless_told_otherwise(
    before: dict[str, str], after: str
) -> None:
    assert _with_huge_pages({"PATH": "/bin"} | before) == {"PATH": "/bin", "GLIBC_TUNABLES": after}
