"""Every route counts the tokens of the prompt, of its cached part, and of the answer."""

from __future__ import annotations

from tests.server.api.contract.routes import Route, Usage, events
from tests.support.rig import Served


async def test_usage_counts_the_tokens_that_the_engine_saw(served: Served, route: Route) -> None:
    served.engine.cached_tokens = 2
    whole = (await route.post(served)).json()
    [request] = served.engine.requests
    expected = Usage(len(request.prompt), 2, 14)  # 13 bytes and the end token
    assert route.usage(whole) == expected
    found, _ = events(await route.post(served, stream=True, **route.usage_fields))
    assert route.streamed_usage(found) == expected
    assert await served.metric("prompt_tokens_total") == 2 * len(request.prompt)
    assert await served.metric("generation_tokens_total") == 28
