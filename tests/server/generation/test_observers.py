"""Observers of a generation: what they learn, in which order, and what a refusal leaves."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.config import EngineConfig
from engine.errors import EngineOverloadedError
from server.app import create_app
from server.config import ServerConfig
from server.generation.generation import Generation
from server.http.errors import ApiError
from server.http.key_limits import KeyLimits
from server.http.rate_limits import RateLimiter
from server.telemetry.observer import Begun, Closed, Finished, GenerationObserver, Token
from tests.support.fake_engine import NOT_FINITE, FakeEngine
from tests.support.prepared import prepared_request

PROMPT = [64, 65]


class Nothing(GenerationObserver):
    """Overrides nothing."""


class Log(GenerationObserver):
    """Notes the name of each call, and its argument."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.given: list[Any] = []

    def _note(self, name: str, given: Any = None) -> None:
        self.names.append(name)
        self.given.append(given)

    @contextlib.contextmanager
    def submission(self) -> Iterator[None]:
        self._note("enter")
        try:
            yield
        finally:
            self._note("leave")

    def begun(self, begun: Begun) -> None:
        self._note("begun", begun)

    def token(self, token: Token) -> None:
        self._note("token", token)

    def finished(self, finished: Finished) -> None:
        self._note("finished", finished)

    def closed(self, closed: Closed) -> None:
        self._note("closed", closed)


def state_of(engine: FakeEngine, model: Path, *observers: GenerationObserver | None) -> Any:
    """Return the state of a server whose generations have these observers only."""
    app = create_app(ServerConfig(), EngineConfig(model=str(model)), engine)
    factories = [lambda prepared, each=each: each for each in observers]
    return dataclasses.replace(app.state.penstock, observers=factories)


@pytest.fixture
def engine(says: Callable[[str], Any]) -> FakeEngine:
    return FakeEngine(says("Hello"))


async def generate(state: Any, **fields: Any) -> None:
    await state.client.start()
    try:
        with Generation(state, prepared_request(PROMPT, **fields)) as generation:
            await generation.collect()
    finally:
        await state.client.stop()


async def test_observer_learns_of_each_token_in_order(model: Path, engine: FakeEngine) -> None:
    log = Log()
    await generate(state_of(engine, model, log), max_tokens=3)
    tokens = ["token"] * 3
    assert log.names == ["enter", "begun", "leave", *tokens, "finished", "closed"]
    [begun] = [each for each in log.given if isinstance(each, Begun)]
    assert [request.prompt for request in begun.requests] == [PROMPT]
    found = [each for each in log.given if isinstance(each, Token)]
    assert [token.last for token in found] == [0.0, *[token.at for token in found[:-1]]]
    assert [token.admission is not None for token in found] == [True, False, False]
    assert {(token.choice, token.is_dropped) for token in found} == {(0, False)}
    finished, closed = log.given[-2:]
    assert (finished.record.num_tokens, finished.record.finish) == (3, "length")
    assert finished.record == closed.records[0]
    assert closed.reason is None


async def test_observer_that_overrides_nothing_changes_nothing(
    model: Path, engine: FakeEngine
) -> None:
    log = Log()
    await generate(state_of(engine, model, Nothing(), None, log), max_tokens=2)
    assert log.names[-1] == "closed"


async def test_token_of_a_request_for_none_is_marked(model: Path, engine: FakeEngine) -> None:
    log = Log()
    await generate(state_of(engine, model, log), max_tokens=0)
    [token] = [each for each in log.given if isinstance(each, Token)]
    assert token.is_dropped
    assert log.given[-1].records[0].num_tokens == 0


async def test_failed_generation_is_closed_with_the_reason(model: Path) -> None:
    log = Log()
    engine = FakeEngine(lambda request: [65, NOT_FINITE])
    with pytest.raises(ApiError):
        await generate(state_of(engine, model, log))
    assert "finished" not in log.names
    assert log.given[-1].reason == "numerical"


async def test_observer_that_fails_at_the_end_leaves_the_others_theirs(
    model: Path, engine: FakeEngine
) -> None:
    class Failing(GenerationObserver):
        def closed(self, closed: Closed) -> None:
            raise ZeroDivisionError

    before, after = Log(), Log()
    with pytest.raises(ZeroDivisionError):
        await generate(state_of(engine, model, before, Failing(), after), max_tokens=2)
    assert before.names[-1] == after.names[-1] == "closed"


async def test_refused_generation_leaves_the_context_and_is_not_closed(
    model: Path, engine: FakeEngine
) -> None:
    log = Log()
    engine.overloaded = True
    with pytest.raises(EngineOverloadedError):
        await generate(state_of(engine, model, Nothing(), log))
    assert log.names == ["enter", "leave"]


class FailsToBegin(GenerationObserver):
    def begun(self, begun: Begun) -> None:
        raise ZeroDivisionError


async def test_observer_that_fails_to_begin_ends_the_requests_that_the_engine_has(
    model: Path, engine: FakeEngine
) -> None:
    before, after = Log(), Log()
    state = state_of(engine, model, before, FailsToBegin(), after)
    limiter = RateLimiter(KeyLimits(concurrent_requests=2))
    limiter.begin()
    prepared = dataclasses.replace(prepared_request(PROMPT, n=2), limiter=limiter)
    with pytest.raises(ZeroDivisionError), Generation(state, prepared):
        raise AssertionError
    assert engine.aborted == [1, 2]
    assert before.names == ["enter", "begun", "leave", "closed"]
    assert before.given[-1].reason == "internal"
    assert after.names == ["enter", "leave"], "only those that have begun are closed"
    limiter.widen(2, "n")  # raises if the request still counts
