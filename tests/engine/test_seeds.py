"""A seeded request samples the same tokens alone, in a batch, after preemption and among aborts."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.support.driver import EXTREMES, Driver

# The tape stands for a GPU. With a CPU's bfloat16 it would prove nothing about one.
modes = pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        pytest.param(dtype, mode, id=f"{dtype}-{name}")
        for dtype in ("float32", "bfloat16")
        for name, mode in EXTREMES.items()
        if dtype == "float32" or "captured" not in mode
    ],
    indirect=["dtype"],
    scope="module",
)

SETTINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 5},
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 2.0, "top_k": 500, "top_p": 0.999},  # needs more than 256 candidates
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
    {"temperature": 1.0, "frequency_penalty": 0.7, "logit_bias": ((11, 3.0), (12, -50.0))},
    {"temperature": 0.0},
    # Token 5 is so likely that its banned sequence is often nearly complete.
    {"temperature": 1.0, "logit_bias": ((5, 9.0),), "banned_sequences": ((5, 5, 5), (7,))},
    {"temperature": 1.6, "top_n_sigma": 2.0, "typical_p": 0.7, "top_k": 300},
)
COUNT = 16


def request(number: int) -> tuple[list[int], dict[str, Any]]:
    """Return the prompt (1 to 50 tokens) and parameters of request `number`, always the same."""
    rng = random.Random(number)
    prompt = [rng.randrange(600) for _ in range(1 + (number * 17) % 50)]
    return prompt, {**SETTINGS[number % len(SETTINGS)], "seed": number * 1_000_003 - 2**40}


def submit(driver: Driver, number: int, count: int = COUNT) -> int:
    prompt, params = request(number)
    return driver.submit(prompt, count, **params)


@pytest.fixture(scope="module")
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def alone(checkpoint: Path, dtype: str) -> list[list[int]]:
    """The tokens of requests 0 to 31, each computed without any other request in the engine."""
    driver = Driver(checkpoint, dtype=dtype, block_size=16, enable_prefix_caching=False)
    answers = []
    for number in range(32):
        request_id = submit(driver, number)
        driver.run()
        answers.append(driver.tokens(request_id))
    return answers


@modes
@pytest.mark.variants(1)
def test_seeded_requests_in_batch_equal_alone(
    checkpoint: Path, dtype: str, alone: list[list[int]], mode: dict[str, Any]
) -> None:
    driver = Driver(checkpoint, dtype=dtype, **mode, block_size=16, max_num_batched_tokens=48)
    ids = [submit(driver, number) for number in range(32)]
    again = [submit(driver, number) for number in reversed(range(32))]
    driver.run()
    assert [driver.tokens(i) for i in ids] == alone
    assert [driver.tokens(i) for i in reversed(again)] == alone


@modes
@pytest.mark.variants(1)
def test_seeded_requests_after_preemption_equal_alone(
    checkpoint: Path, dtype: str, alone: list[list[int]], mode: dict[str, Any]
) -> None:
    driver = Driver(
        checkpoint,
        dtype=dtype,
        **mode,
        block_size=16,
        num_gpu_blocks_override=10,
        max_model_len=80,
        max_num_batched_tokens=24,
    )
    ids = [submit(driver, number) for number in range(32)]
    driver.run()
    assert driver.stats.preemptions > 0
    assert [driver.tokens(i) for i in ids] == alone


@modes
def test_banned_sequences_after_preemption_never_occur(
    checkpoint: Path, dtype: str, mode: dict[str, Any]
) -> None:
    """Overlapped, the host does not know the last token when the next one is sampled."""
    small = {"num_gpu_blocks_override": 10, "max_model_len": 80, "max_num_batched_tokens": 24}
    driver = Driver(checkpoint, dtype=dtype, **mode, **small, block_size=16)
    params: dict[str, Any] = {"temperature": 1.0, "logit_bias": ((5, 90.0), (6, 80.0))}
    banned = ((5, 5, 5), (6, 6), (5, 6, 5, 5), (5, 5, 6, 5, 6))
    ids = [
        driver.submit([5] * n, 30, seed=n, banned_sequences=banned, **params) for n in range(1, 9)
    ]
    driver.run()
    assert driver.stats.preemptions > 0
    for request_id in ids:
        tokens = driver.tokens(request_id)
        assert tokens[:3] == [5, 5, 6], "the prompt does not count"
        for sequence in banned:
            starts = range(len(tokens) - len(sequence) + 1)
            found = [n for n in starts if tuple(tokens[n:][: len(sequence)]) == sequence]
            assert not found, sequence


@pytest.mark.variants(2)
@modes
def test_seeded_requests_among_aborts_equal_alone(
    checkpoint: Path, dtype: str, alone: list[list[int]], mode: dict[str, Any]
) -> None:
    """Aborts come while requests wait, are prefilled, and are in flight."""
    driver = Driver(checkpoint, dtype=dtype, **mode, block_size=16, max_num_batched_tokens=24)
    kept, doomed, rng = {}, [], random.Random(5)
    for number in range(32):
        doomed.append(submit(driver, number, count=60))
        kept[number] = submit(driver, number)
        doomed.append(submit(driver, 31 - number, count=60))
        driver.turn(rng.randrange(2))
        if number % 2:
            driver.abort(doomed.pop(rng.randrange(len(doomed))), 10**9)
    driver.turn(5)
    driver.abort(*doomed)
    driver.run()
    assert [driver.tokens(kept[number]) for number in range(32)] == alone


def test_different_seeds_give_different_tokens(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    ids = [driver.submit([1, 2, 3], 12, temperature=1.0, seed=seed) for seed in range(20)]
    driver.run()
    assert len({tuple(driver.tokens(i)) for i in ids}) == 20
