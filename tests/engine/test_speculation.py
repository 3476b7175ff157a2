"""Answers are the same with and without speculation, with right and wrong drafts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.scheduling.drafts import MOST_ROWS
from tests.engine.test_seeds import SETTINGS, request
from tests.support.drafts import draft_from, run_with_aborts
from tests.support.driver import EXTREMES, MODES, Driver, each, tiny_llama

COUNT = 24
REQUESTS = range(len(SETTINGS))
Answers = dict[int, list[int]]


def submit(driver: Driver, number: int, **more: Any) -> int:
    prompt, params = request(number)
    return driver.submit(prompt, COUNT, logprobs=1, **params, **more)


@pytest.fixture(scope="module")
def due(checkpoint: Path) -> list[tuple[list[int], list[float]]]:
    """Tokens and logprobs of each request alone, without drafts."""
    driver = Driver(checkpoint, speculation="off", block_size=16, enable_prefix_caching=False)
    found = []
    for number in REQUESTS:
        request_id = submit(driver, number)
        driver.run()
        found.append((driver.tokens(request_id), driver.logprobs(request_id)))
    return found


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("mode", each(EXTREMES))
@pytest.mark.variants(2)
def test_answers_and_logprobs_do_not_depend_on_drafts(
    checkpoint: Path,
    due: list[tuple[list[int], list[float]]],
    mode: dict[str, Any],
    share: float,
) -> None:
    """Streams alone, then three at a time. Blocks are small, so that drafts end in the next one."""
    driver = Driver(checkpoint, block_size=16, **mode)
    ids: dict[int, int] = {}
    draft_from(driver, lambda request_id: due[ids[request_id]][0], share)
    for together in (1, 3):
        for first in range(0, len(REQUESTS), together):
            started = {submit(driver, n): n for n in REQUESTS[first : first + together]}
            ids |= started
            driver.run()
            for request_id, number in started.items():
                tokens, logprobs = due[number]
                assert driver.tokens(request_id) == tokens
                assert driver.logprobs(request_id) == pytest.approx(logprobs, abs=2e-4)
    assert driver.stats.drafted > 40
    assert 0 < driver.stats.drafts < driver.stats.drafted
    right = driver.stats.drafted_right / driver.stats.drafted
    assert right == {0.0: 1.0, 1.0: 0.0}.get(share, pytest.approx(0.6, abs=0.3))


def test_right_drafts_save_steps(
    checkpoint: Path, due: list[tuple[list[int], list[float]]]
) -> None:
    driver = Driver(checkpoint)
    draft_from(driver, lambda request_id: due[0][0], 0.0)
    submit(driver, 0)
    driver.run()
    # The prompt's step yields one token, then drafts of 2, 4 and 7 tokens 3, 5, 8 and the last 7.
    assert driver.stats.step == 1 + 4


def test_drafts_do_not_outlive_preemption_and_aborts(
    checkpoint: Path, due: list[tuple[list[int], list[float]]]
) -> None:
    driver = Driver(checkpoint, depth=1, late=True, block_size=16, num_gpu_blocks_override=9)
    ids: dict[int, int] = {}
    draft_from(driver, lambda request_id: due[ids[request_id]][0], 0.3)
    whole = run_with_aborts(driver, submit, (*REQUESTS, *REQUESTS), ids)
    assert len(whole) >= 14
    for request_id in whole:
        assert driver.tokens(request_id) == due[ids[request_id]][0]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_stop_token_within_a_draft_ends_the_answer(
    checkpoint: Path, due: list[tuple[list[int], list[float]]], mode: dict[str, Any]
) -> None:
    driver = Driver(checkpoint, **mode)
    tokens = due[0][0]
    draft_from(driver, lambda request_id: tokens, 0.0)
    stop = tokens[10]
    request_id = submit(driver, 0, stop_token_ids=(stop,))
    driver.run()
    assert driver.tokens(request_id) == tokens[: tokens.index(stop) + 1]
    assert driver.finish(request_id) == "stop"


def test_windowed_layers_keep_what_rejected_drafts_still_see(tmp_path: Path) -> None:
    folder = tiny_llama(
        tmp_path / "m", architectures=["MistralForCausalLM"], sliding_window=20, head_dim=8
    )
    prompts = [request(number)[0] for number in range(4)]
    plain = Driver(folder, speculation="off", block_size=16)
    wanted = [plain.submit(prompt, 90) for prompt in prompts]
    plain.run()
    driver = Driver(folder, block_size=16)
    ids: dict[int, int] = {}
    draft_from(driver, lambda request_id: plain.tokens(ids[request_id]), 0.3)
    ids.update({driver.submit(p, 90): due for p, due in zip(prompts, wanted, strict=True)})
    driver.run()
    for request_id, due_id in ids.items():
        assert driver.tokens(request_id) == plain.tokens(due_id)
    assert driver.stats.drafted_right


def test_eight_streams_are_not_drafted(
    checkpoint: Path, due: list[tuple[list[int], list[float]]]
) -> None:
    driver = Driver(checkpoint)
    ids: dict[int, int] = {}
    draft_from(driver, lambda request_id: due[ids[request_id]][0], 0.0)
    ids.update({submit(driver, number): number for number in REQUESTS[:MOST_ROWS]})
    driver.run()
    assert driver.stats.drafted == 0


def test_ngrams_are_found_in_other_answers_but_not_across_salts(checkpoint: Path) -> None:
    """An answer without drafts, then its copies: of another tenant, and of the same one."""
    driver = Driver(checkpoint, enable_prefix_caching=False)
    prompt, _ = request(0)
    found = []
    for salt in ("one", "two", "one"):
        before = driver.stats.drafted_right
        request_id = driver.submit(prompt, 60, temperature=1.0, seed=5, salt=salt)
        driver.run()
        found.append((driver.tokens(request_id), driver.stats.drafted_right - before))
    (first, alone), (second, other), (third, same) = found
    assert first == second == third
    assert alone == other
    assert same > alone + 40
