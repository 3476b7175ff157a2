"""Explained answers: the draw of every token is repeated exactly, in any batch and schedule."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from engine.protocol.generate import Explained
from engine.protocol.outputs import StepOutputs
from tests.engine.test_seeds import SETTINGS
from tests.support.driver import EAGER, Driver
from tests.support.driver import MODES as CAPTURED

COUNT = 70  # tokens of an answer: more than a step explains
MODES = [
    pytest.param(mode, id=name, marks=[] if name == "overlapped" else pytest.mark.slow)
    for name, mode in EAGER.items()
]
SMALL = {"num_gpu_blocks_override": 24, "max_num_batched_tokens": 40, "max_model_len": 192}


def request(number: int) -> tuple[list[int], dict[str, Any]]:
    rng = random.Random(number)
    prompt = [rng.randrange(600) for _ in range(1 + (number * 17) % 50)]
    params = {"seed": number * 1_000_003 - 2**40, "min_tokens": number % 3 * 20}
    return prompt, {**SETTINGS[number % len(SETTINGS)], **params, "stop_token_ids": (9, 33)}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "config",
    [pytest.param({}, id="roomy", marks=pytest.mark.slow), pytest.param(SMALL, id="preempting")],
)
@pytest.mark.slow
def test_explained_draws_equal_the_answers(
    checkpoint: Path, mode: dict[str, Any], config: dict[str, Any]
) -> None:
    """50 answers in batches of 16, explained while others are generated."""
    driver = Driver(checkpoint, block_size=16, max_num_seqs=16, **mode, **config)
    requests = [request(number) for number in range(50)]
    ids = [driver.submit(prompt, COUNT, **params) for prompt, params in requests]
    driver.run()
    answers = [driver.tokens(request_id) for request_id in ids]
    assert max(map(len, answers)) == COUNT
    explaining = []
    for (prompt, params), answer in zip(requests, answers, strict=True):
        explaining.append(driver.explain(prompt, answer, **params))
        driver.submit(prompt, 12, **params)
    driver.run()
    assert [driver.drawn(request_id) for request_id in explaining] == answers
    assert (driver.stats.preemptions > 0) == bool(config)


@pytest.mark.parametrize(
    "mode", [pytest.param("captured", marks=pytest.mark.slow), "captured-late"]
)
def test_explained_draws_equal_those_of_step_graphs(checkpoint: Path, mode: str) -> None:
    driver = Driver(checkpoint, block_size=16, max_num_seqs=8, **CAPTURED[mode])
    requests = [request(number) for number in range(8)]
    ids = [driver.submit(prompt, 30, **params) for prompt, params in requests]
    driver.run()
    answers = [driver.tokens(request_id) for request_id in ids]
    explaining = []
    for (prompt, params), answer in zip(requests, answers, strict=True):
        explaining.append(driver.explain(prompt, answer, **params))
        driver.submit(prompt, 6, **params)
    driver.run()
    assert [driver.drawn(request_id) for request_id in explaining] == answers


def test_explained_params_that_differ_draw_other_tokens(checkpoint: Path) -> None:
    driver = Driver(checkpoint, block_size=16)
    answered = driver.submit([1, 2, 3], COUNT, temperature=1.0, seed=7)
    driver.run()
    answer = driver.tokens(answered)
    same, other = (driver.explain([1, 2, 3], answer, temperature=1.0, seed=s) for s in (7, 8))
    driver.run()
    assert driver.drawn(same) == answer
    agreeing = sum(a == b for a, b in zip(driver.drawn(other), answer, strict=True))
    assert agreeing < COUNT / 2


def test_step_explains_at_most_64_tokens(checkpoint: Path) -> None:
    driver = Driver(checkpoint, block_size=16, max_num_batched_tokens=512)
    driver.explain([1, 2, 3], [4] * 200)
    rows = []
    while driver.busy:
        before = len(driver.sent)
        driver.turn()
        rows.append(sum(isinstance(sent, Explained) for sent in driver.sent[before:]))
    assert rows == [64, 64, 64, 8]


def test_prompt_of_an_explained_answer_is_computed_in_larger_chunks(checkpoint: Path) -> None:
    driver = Driver(checkpoint, block_size=16, max_num_batched_tokens=512)
    explained = driver.explain([5] * 150, [4] * 30)
    driver.run()
    assert len(driver.drawn(explained)) == 30
    steps = [sent for sent in driver.sent if isinstance(sent, StepOutputs)]
    assert [chunk.count for step in steps for chunk in step.prefills] == [179]


def test_explained_prompt_comes_from_the_prefix_cache(checkpoint: Path) -> None:
    driver = Driver(checkpoint, block_size=16)
    prompt = list(range(40))
    answered = driver.submit(prompt, 30, temperature=1.0, seed=3)
    driver.run()
    answer = driver.tokens(answered)
    own = driver.explain(prompt, answer, temperature=1.0, seed=3)
    other = driver.explain(prompt, answer, salt="another tenant", temperature=1.0, seed=3)
    driver.run()
    assert driver.cached_tokens(own) >= 32
    assert driver.cached_tokens(other) == 0
    assert driver.drawn(own) == driver.drawn(other) == answer


def test_explained_answer_may_fill_the_context(checkpoint: Path) -> None:
    driver = Driver(checkpoint, block_size=16, max_model_len=64)
    answered = driver.submit([5, 6], 62, temperature=1.0, seed=1)
    driver.run()
    answer = driver.tokens(answered)
    assert len(answer) == 62
    explained = driver.explain([5, 6], answer, temperature=1.0, seed=1)
    driver.run()
    assert driver.drawn(explained) == answer


def test_steps_of_other_requests_carry_nothing_of_it(checkpoint: Path) -> None:
    driver = Driver(checkpoint, block_size=16)
    launch = driver.runner.launch

    def checking(step: Any) -> Any:
        assert not any(new.explain for new in step.new_rows)
        pending = launch(step)
        assert pending._prompt_logprobs or not step.prefills
        assert not pending._explained
        return pending

    driver.runner.launch = checking  # type: ignore[method-assign]
    driver.submit(list(range(50)), 8, temperature=1.0, prompt_logprobs=1)
    driver.run()
    assert {type(message).__name__ for message in driver.sent} == {"StepOutputs"}
    assert driver.runner.rows.explain == {}
