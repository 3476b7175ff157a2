"""Every route: a stream is the whole answer in parts, and its end shows that it is complete."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.server.api.contract.routes import Route, events
from tests.support.fake_engine import FakeEngine, Script
from tests.support.rig import Served, serving


@pytest.mark.parametrize("burst", [1, 5, 100])
async def test_stream_has_the_text_of_the_whole_answer(
    served: Served, route: Route, burst: int
) -> None:
    served.engine.burst = burst
    whole = (await route.post(served)).json()
    found, is_done = events(await route.post(served, stream=True))
    assert route.streamed_text(found) == route.text(whole) == "Hello wörld!"
    assert [route.is_last(event) for event in found] == [False] * (len(found) - 1) + [True]
    assert is_done == route.has_done


async def test_stream_comes_in_parts(served: Served, route: Route) -> None:
    served.engine.delay = 0.002
    found, _ = events(await route.post(served, stream=True))
    texts = [text for event in found if (text := route.streamed_text([event]))]
    assert len(texts) > 6


async def test_stream_keeps_line_separators_of_the_text_within_an_event(
    model: Path, says: Callable[[str], Script], route: Route
) -> None:
    text = "a\u2028b\u2029c\x85d\x0be\r\nf\n\ng"
    async with serving(FakeEngine(says(text)), model) as served:
        found, _ = events(await route.post(served, stream=True, limit=100))
        assert route.streamed_text(found) == text
        assert route.text((await route.post(served, limit=100)).json()) == text
