"""best_of: the likeliest of more candidates are returned, and only they."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from engine.protocol.generate import GenerateRequest, TokenLogprobs
from engine.protocol.outputs import TokenOutput
from tests.server.conftest import EOS
from tests.support.fake_engine import FakeEngine, Running
from tests.support.rig import Served, serving

# By candidate: the token of its text, and the logprobs of its tokens. The end token is the last.
CANDIDATES = [
    (64, (-0.5, -0.5, -0.5)),  # a
    (65, (-0.1, -0.1, -9.0)),  # b: unlikely to end
    (66, (-0.375, -0.125)),  # c: the best mean
    (67, (-0.25,)),  # d: as likely as c, but later
    (68, (-0.01, -0.01, -0.01, -0.01, -8.0)),  # e
]
RANKED = ["c", "", "aa", "eeee", "bb"]


class ScoredEngine(FakeEngine):
    """An engine whose seeds choose among CANDIDATES."""

    def _sample(self, running: Running) -> TokenOutput:
        logprobs = CANDIDATES[running.request.params.seed % 5][1]
        output = super()._sample(running)
        if running.request.params.logprobs < 0:
            return output
        value = logprobs[(running.done - 1) % len(logprobs)]
        top = ((1, -0.25),) * running.request.params.logprobs
        return msgspec.structs.replace(output, logprobs=TokenLogprobs(value, top))


def script(request: GenerateRequest) -> list[int]:
    token, logprobs = CANDIDATES[request.params.seed % 5]
    return [token] * (len(logprobs) - 1) + [EOS]


@pytest.fixture
async def scored(model: Path) -> AsyncIterator[Served]:
    async with serving(ScoredEngine(script), model) as running:
        yield running


async def test_best_of_returns_the_candidates_with_the_highest_mean_logprob(scored: Served) -> None:
    for n in (1, 2, 4):
        answer = (await scored.complete(n=n, best_of=5, seed=0)).json()
        assert [choice["text"] for choice in answer["choices"]] == RANKED[:n]
        assert [choice["index"] for choice in answer["choices"]] == list(range(n))
        assert all(choice["logprobs"] is None for choice in answer["choices"])
        assert answer["usage"]["completion_tokens"] == 14, "all candidates count"
        answer = (await scored.chat(n=n, best_of=5, seed=0)).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == RANKED[:n]


async def test_best_of_chooses_for_each_prompt(scored: Served) -> None:
    body = {"prompt": ["x", "y"], "n": 2, "best_of": 4, "seed": 0}
    answer = (await scored.complete(echo=True, logprobs=2, return_token_ids=True, **body)).json()
    texts = [choice["text"] for choice in answer["choices"]]
    assert texts == ["xc", "x", "yc", "y"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    prompts = [choice["prompt_token_ids"][-1] for choice in answer["choices"]]
    assert prompts == [87, 87, 88, 88]
    shown = [choice["logprobs"]["token_logprobs"][-1] for choice in answer["choices"]]
    assert shown[0] == -0.375
    assert len(scored.engine.requests) == 8


async def test_best_of_equal_to_n_computes_no_logprobs(scored: Served) -> None:
    for fields in ({"best_of": 1}, {"best_of": 2, "n": 2}, {"best_of": 1, "stream": True}):
        assert (await scored.complete(**fields, seed=0)).status_code == 200
    assert {request.params.logprobs for request in scored.engine.requests} == {-1}
    assert len(scored.engine.requests) == 4


async def test_best_of_bounds_the_logprobs_that_it_holds(scored: Served) -> None:
    body = {"prompt": ["a"] * 100, "max_tokens": 500, "best_of": 20}
    assert (await scored.complete(**body, n=20)).status_code == 200
    many = {"prompt": ["a"] * 100, "max_tokens": 500, "best_of": 20, "logprobs": 5}
    answer = await scored.complete(**many)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "logprobs")
