"""Prompt logprobs match the reference in any batch and schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engine.protocol.generate import TokenLogprobs
from tests.support.driver import EXTREMES, MODES, Driver, each
from tests.support.reference_data import CHECKPOINTS_IN_MODES, LLAMA, located
from tests.support.stories import Case, cases_of

CUTS = (1, 30, 64, 70, 110)


@pytest.fixture(params=CHECKPOINTS_IN_MODES)
def folder(request: pytest.FixtureRequest) -> Path:
    return located(request.param)


def told(driver: Driver, request_id: int) -> tuple[TokenLogprobs, ...]:
    first, *others = driver.outputs[request_id]
    assert not any(output.prompt_logprobs for output in others)
    return first.prompt_logprobs


def submit_all(driver: Driver, cases: list[Case]) -> dict[int, tuple[Case, int]]:
    """Submit each text up to each cut with prompt logprobs, and others without in between."""
    due = {}
    for case in cases:
        for cut in CUTS:
            scored = driver.submit(case.after(cut).prompt_ids, 8, logprobs=0, prompt_logprobs=2)
            due[scored] = (case, cut)
            driver.submit(case.after(cut // 2).prompt_ids, 12)
    return due


def check(driver: Driver, due: dict[int, tuple[Case, int]]) -> None:
    """Compare all outputs. The end of each prompt is the reference's own greedy output, so that
    its logprobs are known."""
    for request_id, (case, cut) in due.items():
        scores = told(driver, request_id)
        prompt, rest = case.after(cut).prompt_ids, case.after(cut, 8)
        assert len(scores) == len(prompt) - 1
        written = scores[-cut:]
        assert [s.logprob for s in written] == pytest.approx(case.logprobs[:cut], abs=2e-4)
        assert [s.top[0] for s in written] == list(
            zip(case.ids[:cut], [s.logprob for s in written], strict=True)
        )
        for score, token in zip(scores, prompt[1:], strict=True):
            assert len(score.top) == 2
            assert score.top[0][1] >= max(score.top[1][1], score.logprob)
            assert dict(score.top).get(token, score.logprob) == score.logprob
        assert driver.tokens(request_id) == rest.ids
        assert driver.logprobs(request_id) == pytest.approx(rest.logprobs, abs=2e-4)


@pytest.mark.parametrize("mode", each(MODES))
@pytest.mark.variants(1)
def test_prompt_logprobs_match_reference(folder: Path, mode: dict[str, Any]) -> None:
    driver = Driver(folder, block_size=16, **mode)
    due = submit_all(driver, cases_of(folder))
    driver.run()
    check(driver, due)


SMALL = {"num_gpu_blocks_override": 12, "max_model_len": 192, "max_num_batched_tokens": 24}
SETTINGS: list[dict[str, Any]] = [
    {"max_num_batched_tokens": 8},
    {"max_num_batched_tokens": 100},
    {"enable_prefix_caching": False},
    SMALL,
]
# A tape is slow, so that the fast run captures only with the setting that preempts.
PAIRS = [
    pytest.param(
        EXTREMES[name],
        setting,
        id=f"{setting}-{name}",
        marks=[pytest.mark.slow] if name == "captured-late" and setting is not SMALL else [],
    )
    for name in EXTREMES
    for setting in SETTINGS
]


@pytest.mark.parametrize(("mode", "config"), PAIRS)
@pytest.mark.variants(1)
def test_prompt_logprobs_any_engine_setting_matches_reference(
    mode: dict[str, Any], config: dict[str, Any]
) -> None:
    folder = located(LLAMA)
    driver = Driver(folder, block_size=16, **mode, **config)
    due = submit_all(driver, cases_of(folder))
    driver.run()
    check(driver, due)
    assert (driver.stats.preemptions > 0) == ("num_gpu_blocks_override" in config)


def test_prompt_logprobs_in_batch_equal_alone_bitwise() -> None:
    folder = located(LLAMA)
    cases = cases_of(folder)
    crowd, alone = Driver(folder), Driver(folder)
    if crowd.core.facts.batch_variance:
        pytest.skip(f"bits depend on the step here: {crowd.core.facts.batch_variance}")
    due = submit_all(crowd, cases)
    crowd.run()
    for request_id, (case, cut) in due.items():
        same = alone.submit(case.after(cut).prompt_ids, 8, logprobs=0, prompt_logprobs=2)
        alone.run()
        assert told(crowd, request_id) == told(alone, same)


def test_prompt_logprobs_recompute_cached_prompt(checkpoint: Path) -> None:
    driver = Driver(checkpoint, block_size=16)
    prompt = list(range(40))
    first = driver.submit(prompt, 2, prompt_logprobs=0)
    driver.run()
    again, plain = driver.submit(prompt, 2, prompt_logprobs=0), driver.submit(prompt, 2)
    driver.run()
    assert [driver.cached_tokens(i) for i in (first, again, plain)] == [0, 0, 32]
    assert told(driver, again) == told(driver, first)
    assert not told(driver, plain)


def test_prompt_logprobs_single_token_prompt_returns_none(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    only = driver.submit([3], 2, prompt_logprobs=3)
    driver.run()
    assert told(driver, only) == ()
    assert len(driver.tokens(only)) == 2


def test_prompt_logprobs_count_is_limited_to_vocabulary(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    every = driver.submit([3, 4, 5], 1, prompt_logprobs=10**6)
    driver.run()
    for score in told(driver, every):
        assert sorted(token for token, _ in score.top) == list(range(600))
        place = [logprob for _, logprob in score.top].index(score.logprob)
        assert score.rank == place + 1
        total = torch.tensor([logprob for _, logprob in score.top]).logsumexp(0)
        assert float(total) == pytest.approx(0, abs=1e-5)


def test_prompt_logprobs_impossible_token_is_minus_inf_without_error(checkpoint: Path) -> None:
    driver = Driver(checkpoint)
    logits: Any = driver.runner.model.logits

    def masked(hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = logits(hidden)
        result[:, 7] = -torch.inf
        return result

    driver.runner.model.logits = masked  # type: ignore[method-assign]
    request = driver.submit([5, 6, 7, 8], 2, prompt_logprobs=0)
    driver.run()
    assert driver.finish(request) == "length"
    scores = [score.logprob for score in told(driver, request)]
    assert scores[1] == -torch.inf
    assert all(-torch.inf < score < 0 for score in (scores[0], scores[2]))


def test_prompt_logprobs_nan_fails_request(checkpoint: Path) -> None:
    """Even if the logits that the next token is sampled from are finite."""
    driver = Driver(checkpoint)
    logits: Any = driver.runner.model.logits

    def spoilt(hidden: torch.Tensor) -> torch.Tensor:
        result = logits(hidden)
        if len(hidden) > 1:  # logits of prompt tokens
            result[1, 5] = float("nan")
        return result

    driver.runner.model.logits = spoilt  # type: ignore[method-assign]
    victim = driver.submit(list(range(40)), 4, prompt_logprobs=0)
    driver.run()
    assert driver.finish(victim) == "error"
    assert driver.stats.blocks_cached == 0
