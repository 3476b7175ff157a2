"""Submission: submitted on entry, closed once on exit, and counted by what ended it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import EngineDeadError, EngineOverloadedError, RequestRejectedError
from server.app import create_app
from server.config import ServerConfig
from server.generation.embedding import Embedding
from server.generation.generation import Generation
from server.generation.submission import abort_reason
from server.http.errors import ClientGone, ClientStalled, StreamBroken, numerical_error
from server.state import AppState
from server.telemetry.exposition import Exposition
from tests.support.fake_encoder import FakeEncoder
from tests.support.fake_engine import FakeEngine
from tests.support.prepared import prepared_request
from tests.support.prometheus import metric

PROMPT = [64, 65]


def state_with(engine: FakeEngine, model: Path) -> AppState:
    app = create_app(ServerConfig(), EngineConfig(model=str(model)), engine)
    state = app.state.penstock
    assert isinstance(state, AppState)
    return state


@pytest.fixture
async def state(model: Path, says: Callable[[str], Any]) -> AppState:
    return state_with(FakeEngine(says("Hello")), model)


def aborts(state: AppState, **labels: str) -> float:
    text = Exposition(state.metrics.registry).render().decode()
    return metric(text, "aborts_total", **labels)


async def test_constructor_sends_nothing_and_entry_submits_every_choice(state: Any) -> None:
    generation = Generation(state, prepared_request(PROMPT, n=3))
    assert not state.client.requests
    with generation:
        assert [request.prompt for request in state.client.requests] == [PROMPT] * 3


async def test_submission_refused_by_the_engine_is_not_closed(state: Any) -> None:
    state.client.overloaded = True
    with pytest.raises(EngineOverloadedError), Generation(state, prepared_request(PROMPT)):
        raise AssertionError
    assert not state.client.aborted
    assert aborts(state) == 0


async def test_complete_generation_closes_without_abort(state: Any) -> None:
    await state.client.start()
    with Generation(state, prepared_request(PROMPT, n=2, max_tokens=6)) as generation:
        answers = await generation.collect()
    assert [answer.index for answer in answers] == [0, 1]
    assert generation.usage().completion_tokens == 12
    assert not state.client.aborted
    assert aborts(state) == 0
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
    state: Any, error: BaseException, reason: str
) -> None:
    with pytest.raises(type(error)), Generation(state, prepared_request(PROMPT, n=2)):
        raise error
    assert state.client.aborted == [1, 2]
    assert aborts(state) == aborts(state, reason=reason) == 1


async def test_exit_without_error_before_the_end_counts_as_disconnect(state: Any) -> None:
    with Generation(state, prepared_request(PROMPT)):
        pass
    assert aborts(state, reason="disconnect") == 1


@pytest.mark.parametrize("error", [EngineDeadError("x"), StreamBroken(EngineDeadError("x"))])
def test_abort_reason_of_dead_engine_during_drain_is_shutdown(error: Exception) -> None:
    assert abort_reason(error, draining=True) == "shutdown"
    assert abort_reason(error, draining=False) == "engine"


async def test_embedding_has_the_same_life(model: Path) -> None:
    state: Any = state_with(FakeEncoder(lambda request: []), model)
    embedding = Embedding(state, [[1, 2], [3]], arrival=0.0, priority=0)
    assert not state.client.texts
    with pytest.raises(ClientGone), embedding:
        raise ClientGone
    assert [text.tokens for text in state.client.texts] == [[1, 2], [3]]
    assert state.client.aborted == [1, 2]
    assert aborts(state) == aborts(state, reason="disconnect") == 1
    await state.client.start()
    with Embedding(state, [[1, 2], [3]], arrival=0.0, priority=0) as embedding:
        assert (await embedding.collect()).shape == (2, 4)
    assert aborts(state) == 1
    await state.client.stop()
