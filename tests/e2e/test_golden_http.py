"""Answers over HTTP equal the reference's tokens, in several configurations of the engine."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.support.reference_data import GPT2, LLAMA, located, reference
from tests.support.serve import Server, check, complete, greedy, serving
from tests.support.stories import Case, cases_of

BLOCK = 16


@dataclass(frozen=True)
class Setup:
    budget: int  # tokens in one step
    blocks: int  # blocks of the KV cache; few blocks cause preemption
    caching: bool

    @property
    def flags(self) -> list[str]:
        flags = ["--block-size", str(BLOCK), "--max-num-batched-tokens", str(self.budget)]
        flags += ["--num-gpu-blocks-override", str(self.blocks)]
        return flags if self.caching else [*flags, "--no-enable-prefix-caching"]


ROOMY = Setup(budget=512, blocks=1024, caching=True)
SETUPS = [ROOMY, Setup(budget=64, blocks=24, caching=True), Setup(8, blocks=24, caching=False)]


@dataclass(frozen=True)
class Rig:
    server: Server
    setup: Setup
    cases: list[Case]

    @property
    def is_tight(self) -> bool:
        return self.setup is not ROOMY


MODELS = [
    LLAMA,
    pytest.param(GPT2, marks=pytest.mark.slow),
    reference("checkpoints/stories260K-llama", marks=[pytest.mark.slow]),
    reference("checkpoints/stories280K-gpt2", marks=[pytest.mark.slow]),
]


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request: pytest.FixtureRequest) -> Path:
    return located(request.param)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(SETUPS[0], id="roomy"),
        pytest.param(SETUPS[1], id="tight", marks=pytest.mark.slow),
        pytest.param(SETUPS[2], id="tight-uncached"),
    ],
)
def rig(request: pytest.FixtureRequest, checkpoint: Path) -> Iterator[Rig]:
    setup: Setup = request.param
    with serving(checkpoint, "--dtype", "float32", *setup.flags) as server:
        yield Rig(server, setup, cases_of(checkpoint))


async def test_completion_alone_equals_the_reference(rig: Rig) -> None:
    async with rig.server.http() as http:
        for index, case in enumerate(rig.cases[:2] if rig.is_tight else rig.cases):
            check(await complete(http, greedy(case, stream=index % 2 == 0)), case)


async def test_32_concurrent_completions_equal_the_reference(rig: Rig) -> None:
    before = rig.server.metric("num_preemptions_total")
    # A prefix of a greedy text continues with the rest of that text, so prompts of any length
    # have known answers.
    crowd = [
        rig.cases[i % len(rig.cases)].after((0, 5, 19, 33, 64, 90)[i % 6], most=24 + 2 * i)
        for i in range(32)
    ]
    async with rig.server.http() as http:
        bodies = [greedy(case, stream=i % 3 != 0) for i, case in enumerate(crowd)]
        answers = await asyncio.gather(*(complete(http, body) for body in bodies))
    for answer, case in zip(answers, crowd, strict=True):
        check(answer, case)
    preemptions = rig.server.metric("num_preemptions_total") - before
    assert preemptions > 0 if rig.is_tight else preemptions == 0
    rig.server.wait_idle()


async def test_repeated_prompt_reuses_the_prefix_cache(rig: Rig) -> None:
    case = rig.cases[-1].after(100)
    reusable = (len(case.prompt_ids) - 1) // BLOCK * BLOCK if rig.setup.caching else 0
    before = rig.server.metric("prefix_cache_hits_total")
    async with rig.server.http() as http:
        cached = []
        for stream in (False, True):
            answer = await complete(http, greedy(case, stream=stream, cache_salt="mine"))
            check(answer, case)
            cached.append(answer.cached)
        other = await complete(http, greedy(case, cache_salt="yours"))
        check(other, case)
    assert cached == [0, reusable]
    assert other.cached == 0, "a prefix was shared between two tenants"
    assert rig.server.metric("prefix_cache_hits_total") - before == reusable


async def test_long_prompt_takes_as_many_steps_as_the_budget_implies(rig: Rig) -> None:
    case = rig.cases[0].after(110, most=1)
    before = rig.server.metric("engine_step_seconds_count")
    async with rig.server.http() as http:
        check(await complete(http, greedy(case, cache_salt="budget")), case)
    steps = rig.server.metric("engine_step_seconds_count") - before
    assert steps == math.ceil(len(case.prompt_ids) / rig.setup.budget)


async def test_seeded_completion_is_equal_alone_and_in_a_batch(rig: Rig) -> None:
    body = greedy(rig.cases[0].after(3, most=48), temperature=1.0, seed=7, ignore_eos=True)
    crowd = [
        body | {"prompt": rig.cases[i % len(rig.cases)].after(i).prompt_ids, "seed": 100 + i}
        for i in range(31)
    ]
    async with rig.server.http() as http:
        alone = await complete(http, body)
        others = [
            leave(http, other, after=i) if i % 3 == 0 else complete(http, other)
            for i, other in enumerate(crowd)
        ]
        amid, *answers = await asyncio.gather(complete(http, body | {"stream": True}), *others)
    assert len(alone.ids) == 48
    assert amid.ids == alone.ids
    assert amid.logprobs == pytest.approx(alone.logprobs, abs=1e-3)
    texts = {tuple(answer.ids) for answer in answers if answer is not None}
    assert len(texts) == 20, "different seeds must give different texts"
    assert tuple(alone.ids) not in texts
    rig.server.wait_idle()


async def leave(http: httpx2.AsyncClient, body: dict[str, Any], after: int) -> None:
    """Disconnect after `after` lines of the stream."""
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        async for _ in response.aiter_lines():
            after -= 1
            if after < 0:
                return
