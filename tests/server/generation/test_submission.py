"""Submission: submitted on entry, closed once on exit, and counted by what ended it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from engine.config import EngineConfig
from engine.errors import EngineDeadError, EngineOverloadedError, RequestRejectedError
from engine.protocol.generate import Explain, GenerateRequest, SamplingParams
from server.app import create_app
from server.config import ServerConfig
from server.generation.embedding import Embedding
from server.generation.embedding_state import EmbeddingState
from server.generation.generation import Generation
from server.generation.submission import abort_reason
from server.generation.texts import EncodedText
from server.glassbox.explain.explanation import Explanation
from server.http.errors import ClientGone, ClientStalled, StreamBroken, numerical_error
from server.http.key_limits import KeyLimits
from server.http.rate_limits import RateLimiter
from server.telemetry.exposition import Exposition
from server.telemetry.metrics import Metrics
from tests.support.fake_encoder import FakeEncoder
from tests.support.fake_engine import FakeEngine
from tests.support.prepared import prepared_request
from tests.support.prometheus import metric

PROMPT = [64, 65]
TEXTS = [EncodedText([1, 2]), EncodedText([3])]


@dataclass
class App:
    """The parts of an application that these tests use."""

    state: Any  # its client is a FakeEngine
    embedding: EmbeddingState
    metrics: Metrics


def app_with(engine: FakeEngine, model: Path) -> App:
    state = create_app(ServerConfig(), EngineConfig(model=str(model)), engine).state
    return App(state.penstock, state.embedding, state.metrics)


@pytest.fixture
async def app(model: Path, says: Callable[[str], Any]) -> App:
    return app_with(FakeEngine(says("Hello")), model)


@pytest.fixture
def state(app: App) -> Any:
    return app.state


def aborts(app: App, **labels: str) -> float:
    text = Exposition(app.metrics.registry).render().decode()
    return metric(text, "aborts_total", **labels)


async def test_constructor_sends_nothing_and_entry_submits_every_choice(state: Any) -> None:
    generation = Generation(state, prepared_request(PROMPT, n=3))
    assert not state.client.requests
    with generation:
        assert [request.prompt for request in state.client.requests] == [PROMPT] * 3


async def test_submission_refused_by_the_engine_is_not_closed(app: App, state: Any) -> None:
    state.client.overloaded = True
    with pytest.raises(EngineOverloadedError), Generation(state, prepared_request(PROMPT)):
        raise AssertionError
    assert not state.client.aborted
    assert aborts(app) == 0


async def test_complete_generation_closes_without_abort(app: App, state: Any) -> None:
    await state.client.start()
    with Generation(state, prepared_request(PROMPT, n=2, max_tokens=6)) as generation:
        answers = await generation.collect()
    assert [answer.index for answer in answers] == [0, 1]
    assert generation.usage().completion_tokens == 12
    assert not state.client.aborted
    assert aborts(app) == 0
    await state.client.stop()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ClientGone(), "disconnect"),
        (asyncio.CancelledError(), "disconnect"),
        (ClientStalled(), "send_timeout"),
        (EngineDeadError("x"), "engine"),
        (RequestRejectedError("x", "x"), "rejected"),
        (numerical_error(), "numerical"),
        (ZeroDivisionError(), "internal"),
        (StreamBroken(EngineDeadError("x")), "engine"),
        (StreamBroken(numerical_error()), "numerical"),
    ],
)
async def test_error_aborts_unfinished_requests_and_is_counted_once(
    app: App, state: Any, error: BaseException, reason: str
) -> None:
    with pytest.raises(type(error)), Generation(state, prepared_request(PROMPT, n=2)):
        raise error
    assert state.client.aborted == [1, 2]
    assert aborts(app) == aborts(app, reason=reason) == 1


async def test_exit_without_error_before_the_end_counts_as_disconnect(app: App, state: Any) -> None:
    with Generation(state, prepared_request(PROMPT)):
        pass
    assert aborts(app, reason="disconnect") == 1


@pytest.mark.parametrize("error", [EngineDeadError("x"), StreamBroken(EngineDeadError("x"))])
def test_abort_reason_of_dead_engine_during_drain_is_shutdown(error: Exception) -> None:
    assert abort_reason(error, draining=True) == "shutdown"
    assert abort_reason(error, draining=False) == "engine"


@pytest.mark.parametrize("kind", ["embedding", "explanation"])
async def test_requests_whose_tokens_cannot_be_counted_are_aborted(model: Path, kind: str) -> None:
    app = app_with(FakeEncoder(lambda request: []), model)
    state = app.state
    limiter = RateLimiter(KeyLimits(tokens_per_minute=1, concurrent_requests=2))
    limiter.begin()
    submission: Embedding | Explanation
    if kind == "embedding":
        submission = Embedding(
            state, app.embedding, TEXTS, arrival=0.0, priority=0, limiter=limiter
        )
    else:
        explain = Explain([1], SamplingParams(max_tokens=1), 1, 1)
        request = GenerateRequest(1, PROMPT, SamplingParams(max_tokens=1), 0.0, explain=explain)
        submission = Explanation(state, app.metrics, request, limiter)
    with (
        mock.patch.object(limiter, "use_tokens", side_effect=ZeroDivisionError),
        pytest.raises(ZeroDivisionError),
        submission,
    ):
        raise AssertionError
    assert state.client.aborted == [1, 2][: submission._num_requests]
    assert aborts(app, reason="internal") == 1
    limiter.widen(2, "input")  # raises if the requests still count


async def test_embedding_has_the_same_life(model: Path) -> None:
    app = app_with(FakeEncoder(lambda request: []), model)
    state = app.state
    embedding = Embedding(state, app.embedding, TEXTS, arrival=0.0, priority=0)
    assert not state.client.texts
    with pytest.raises(ClientGone), embedding:
        raise ClientGone
    assert [text.tokens for text in state.client.texts] == [[1, 2], [3]]
    assert state.client.aborted == [1, 2]
    assert aborts(app) == aborts(app, reason="disconnect") == 1
    await state.client.start()
    with Embedding(state, app.embedding, TEXTS, arrival=0.0, priority=0) as embedding:
        assert (await embedding.collect()).shape == (2, 4)
    assert aborts(app) == 1
    await state.client.stop()
