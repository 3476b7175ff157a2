"""Failures of one request do not affect others: NaN, aborts, and the blocks they leave behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.driver import MODES, Driver, each

modes = pytest.mark.parametrize("mode", each(MODES))
PROMPTS = [list(range(start, start + 5 + 9 * start)) for start in range(1, 6)]


def with_hot_token(checkpoint: Path, hot: int, **config: Any) -> Driver:
    """Return a model in which all results computed from the token `hot` are NaN, also its KV."""
    driver = Driver(checkpoint, block_size=16, **config)
    embed: Any = driver.runner.model.embed  # type: ignore[attr-defined]
    embed.weight.data[hot] = float("nan")
    return driver


def finite(driver: Driver) -> bool:
    return all(
        bool(torch.isfinite(kv.keys).all() and torch.isfinite(kv.values).all())
        for kv in driver.runner.kv.layers
    )


@pytest.fixture(scope="module")
def healthy(checkpoint: Path) -> list[list[int]]:
    driver = Driver(checkpoint)
    ids = [driver.submit(prompt, 20) for prompt in PROMPTS]
    driver.run()
    return [driver.tokens(i) for i in ids]


@pytest.fixture(scope="module")
def hot(healthy: list[list[int]]) -> int:
    """A token that occurs in no prompt and in no healthy answer."""
    return min(set(range(300, 600)) - {token for answer in healthy for token in answer})


@modes
@pytest.mark.parametrize("after", [0, 1, 7])
@pytest.mark.variants(3)
def test_core_nan_logits_fail_only_one_request(
    checkpoint: Path, healthy: list[list[int]], mode: dict[str, Any], after: int
) -> None:
    """The request ends with finish reason "error" and keeps its tokens; others are unchanged."""
    driver = Driver(checkpoint, block_size=16, **mode)
    victim = driver.submit(PROMPTS[2], 20, logprobs=2)
    ids = [driver.submit(prompt, 20) for prompt in PROMPTS]
    while len(driver.tokens(victim)) < after:
        driver.turn()
    driver.poisoned.add(victim)
    driver.run()
    assert driver.finish(victim) == "error"
    assert driver.tokens(victim)[-1] == -1
    assert driver.tokens(victim)[:-1] == healthy[2][: len(driver.tokens(victim)) - 1]
    assert driver.outputs[victim][-1].logprobs is None
    assert [driver.tokens(i) for i in ids] == healthy


@modes
def test_prefix_cache_failed_request_leaves_no_blocks(
    checkpoint: Path, mode: dict[str, Any]
) -> None:
    driver = Driver(checkpoint, block_size=16, **mode)
    victim = driver.submit(PROMPTS[4], 20)
    driver.poisoned.add(victim)
    driver.run()
    assert driver.finish(victim) == "error"
    assert driver.stats.blocks_cached == 0
    again = driver.submit(PROMPTS[4], 20)
    driver.run()
    assert driver.cached_tokens(again) == 0


@modes
def test_kv_cache_nan_blocks_are_zeroed_before_reuse(
    checkpoint: Path, healthy: list[list[int]], hot: int, mode: dict[str, Any]
) -> None:
    """A masked key has weight 0, but 0 * NaN is NaN: the next owner of a block would fail too."""
    driver = with_hot_token(checkpoint, hot, **mode, num_gpu_blocks_override=16)
    victim = driver.submit([*PROMPTS[3], hot], 20)
    driver.run()
    assert driver.finish(victim) == "error"
    assert not finite(driver)
    ids = [driver.submit(prompt, 20) for prompt in PROMPTS]
    driver.run()
    assert [driver.tokens(i) for i in ids] == healthy
    assert finite(driver) or not driver.runner.backend.reads_masked_keys


@modes
def test_kv_cache_nan_blocks_of_aborted_prompt_are_zeroed_before_reuse(
    checkpoint: Path, healthy: list[list[int]], hot: int, mode: dict[str, Any]
) -> None:
    """The NaN was never detected, because the request sampled no token."""
    config = {"num_gpu_blocks_override": 6, "max_num_batched_tokens": 16, "max_model_len": 96}
    driver = with_hot_token(checkpoint, hot, **mode, **config)
    victim = driver.submit([hot, *range(60)], 20)
    driver.turn(3)
    driver.abort(victim)
    driver.turn()
    assert not finite(driver)
    ids = [driver.submit(prompt, 20) for prompt in PROMPTS]
    driver.run()
    assert [driver.tokens(i) for i in ids] == healthy


@modes
def test_core_nan_requests_leave_others_in_same_steps_unchanged(
    checkpoint: Path, healthy: list[list[int]], hot: int, mode: dict[str, Any]
) -> None:
    """Half of the requests fail, in chunks and decodes. The pool is so small that it preempts."""
    config = {"num_gpu_blocks_override": 8, "max_num_batched_tokens": 16, "max_model_len": 128}
    driver = with_hot_token(checkpoint, hot, **mode, **config)
    ids, victims = [], []
    for prompt in PROMPTS * 2:
        ids.append(driver.submit(prompt, 20))
        victims.append(driver.submit([*prompt, hot, *prompt], 20))
    driver.run()
    assert {driver.finish(i) for i in victims} == {"error"}
    assert [driver.tokens(i) for i in ids] == healthy * 2
    assert driver.stats.preemptions > 0


@modes
@pytest.mark.parametrize("turns", [0, 1, 2, 3, 10])
@pytest.mark.variants(2)
def test_core_abort_frees_all_blocks_at_once(
    checkpoint: Path, healthy: list[list[int]], mode: dict[str, Any], turns: int
) -> None:
    """Abort while queued, in a prefill chunk, in flight and in decode; twice; with unknown ids."""
    driver = Driver(checkpoint, block_size=16, max_num_batched_tokens=16, **mode)
    ids = [driver.submit(prompt, 20) for prompt in PROMPTS]
    driver.turn(turns)
    driver.abort(*ids, *ids, 10**9)
    driver.turn()
    assert (driver.stats.running, driver.stats.waiting, driver.stats.blocks_held) == (0, 0, 0)
    counts = {i: len(driver.tokens(i)) for i in ids}
    driver.abort(*ids)
    driver.run()
    assert counts == {i: len(driver.tokens(i)) for i in ids}, "a token after the abort"
    again = [driver.submit(prompt, 20) for prompt in PROMPTS]
    driver.run()
    assert [driver.tokens(i) for i in again] == healthy


@modes
def test_core_abort_keeps_blocks_shared_with_others(
    checkpoint: Path, healthy: list[list[int]], mode: dict[str, Any]
) -> None:
    """The other requests keep the blocks, and reference counts stay exact."""
    driver = Driver(checkpoint, block_size=16, **mode)
    ids = []
    for _ in range(6):
        ids.append(driver.submit(PROMPTS[4], 20))
        driver.turn(2)
    driver.abort(*ids[::2])
    driver.run()
    assert [driver.tokens(i) for i in ids[1::2]] == [healthy[4]] * 3
    assert driver.stats.prefix_hits == 5 * 48
