"""Greedy decoding matches the reference, alone and in any batch, schedule or cache state.

The reference implementation computed `expected.json`, one prompt at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.driver import EAGER, EXTREMES, MODES, Driver, each
from tests.support.reference_data import (
    CHECKPOINTS,
    CHECKPOINTS_IN_MODES,
    GPT2,
    LLAMA,
    PUBLISHED,
    located,
    reference,
)
from tests.support.stories import Case, cases_of

modes = pytest.mark.parametrize("mode", each(EXTREMES))
in_modes = pytest.mark.parametrize("golden", CHECKPOINTS_IN_MODES, indirect=True)


@dataclass(frozen=True)
class Golden:
    folder: Path
    cases: list[Case]


def load(folder: Path) -> Golden:
    return Golden(folder, cases_of(folder))


@pytest.fixture
def llama() -> Golden:
    return load(located(LLAMA))


@pytest.fixture(params=CHECKPOINTS)
def golden(request: pytest.FixtureRequest) -> Golden:
    return load(located(request.param))


def check(golden: Golden, driver: Driver, requests: list[tuple[int, int]]) -> None:
    """Submit all requests (cut, count) at once, cycling through the cases; compare all outputs."""
    due = {}
    for number, (at, count) in enumerate(requests):
        case = golden.cases[number % len(golden.cases)].after(at, count)
        due[driver.submit(case.prompt_ids, count, logprobs=0)] = case
    driver.run()
    for request_id, case in due.items():
        assert driver.tokens(request_id) == case.ids
        assert driver.logprobs(request_id) == pytest.approx(case.logprobs, abs=2e-4)
        assert driver.finish(request_id) == "length"


MIXED = [((number * 13) % 70, 6 + (number * 7) % 22) for number in range(32)]
PRESSING = [((number * 13) % 70, 20 + (number * 7) % 16) for number in range(16)]


@pytest.mark.variants(1)
def test_expected_answers_are_those_of_transformers(golden: Golden) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(golden.folder, dtype=torch.float32).eval()
    for case in golden.cases:
        ids = torch.tensor([case.prompt_ids + case.ids])
        with torch.inference_mode():
            logprobs = model(ids).logits[0, len(case.prompt_ids) - 1 : -1].log_softmax(-1)
        best = logprobs.max(-1)
        assert best.indices.tolist() == case.ids
        assert best.values.tolist() == pytest.approx(case.logprobs, abs=2e-4)


@pytest.mark.variants(2)
def test_greedy_single_request_matches_reference(golden: Golden) -> None:
    driver = Driver(golden.folder)
    for case in golden.cases:
        check(Golden(golden.folder, [case]), driver, [(0, 120)])


@pytest.mark.variants(4)
@in_modes
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_greedy_32_concurrent_requests_match_reference(
    golden: Golden, mode: dict[str, Any]
) -> None:
    check(golden, Driver(golden.folder, **mode), MIXED)


@pytest.mark.parametrize("mode", [EAGER["synchronous"], EAGER["late"]], ids=str)
@pytest.mark.parametrize(
    "config",
    [
        {"max_num_batched_tokens": 8},
        {"max_num_batched_tokens": 64},
        {"max_num_batched_tokens": 512},
        {"block_size": 16},
        {"block_size": 128},
        {"max_num_seqs": 5},
        {"prepack": False},
        {"enable_prefix_caching": False},
    ],
    ids=str,
)
@pytest.mark.variants(3)
def test_greedy_any_engine_setting_matches_reference(
    llama: Golden, mode: dict[str, Any], config: dict[str, Any]
) -> None:
    driver = Driver(llama.folder, **mode, **config)
    check(llama, driver, MIXED)
    long_enough = config.get("enable_prefix_caching", True) and config.get("block_size") != 128
    assert (driver.stats.prefix_hits > 0) == long_enough


@modes
@pytest.mark.parametrize(
    ("golden", "budget", "prefix_caching"),
    [
        (LLAMA, 8, True),
        pytest.param(GPT2, 64, False, marks=pytest.mark.slow),
        pytest.param(LLAMA, 64, False, marks=pytest.mark.slow),
        pytest.param(GPT2, 8, True, marks=pytest.mark.slow),
        reference(PUBLISHED[0], 8, True, marks=[pytest.mark.slow]),
    ],
    indirect=["golden"],
)
@pytest.mark.variants(1)
def test_greedy_after_preemption_matches_reference(
    golden: Golden, mode: dict[str, Any], budget: int, prefix_caching: bool
) -> None:
    """So few blocks that sequences are preempted and recomputed several times."""
    driver = Driver(
        golden.folder,
        **mode,
        block_size=16,
        num_gpu_blocks_override=10,
        max_model_len=128,
        max_num_batched_tokens=budget,
        enable_prefix_caching=prefix_caching,
    )
    check(golden, driver, PRESSING)
    assert 0 < driver.stats.preemptions <= 10 * len(PRESSING)


@modes
def test_greedy_block_shared_in_step_that_fills_it_matches_reference(
    llama: Golden, mode: dict[str, Any]
) -> None:
    """The second prompt reuses the two blocks of the first. Its one extra token comes first in the
    step in which the first prompt fills the second block."""
    case = next(case for case in llama.cases if len(case.prompt_ids) <= 32)
    at = 32 - len(case.prompt_ids)
    driver = Driver(llama.folder, **mode, block_size=16, max_num_batched_tokens=23)
    check(Golden(llama.folder, [case]), driver, [(at, 2), (at + 1, 20)])
    assert driver.stats.prefix_hits == 32


@in_modes
@modes
@pytest.mark.variants(1)
def test_greedy_cold_and_cached_prompts_match_reference(
    golden: Golden, mode: dict[str, Any]
) -> None:
    """The same prompts without cache hits, then with hits, then together with other lengths."""
    distinct = Golden(golden.folder, golden.cases[-2:])
    requests = [(60, 20), (60, 20)]
    driver = Driver(golden.folder, **mode, block_size=16)
    check(distinct, driver, requests)
    assert driver.stats.prefix_hits == 0
    check(distinct, driver, requests)
    assert driver.stats.prefix_hits == 2 * 64
    check(distinct, driver, [*requests, (70, 20), (70, 20), (90, 20), (50, 40)])
    assert driver.stats.prefix_hits >= 2 * 64 + 6 * 48


TORCH = {"attention_backend": "torch"}  # captures use it anyway


@pytest.mark.variants(4)
@in_modes
@pytest.mark.parametrize("mode", [*each(EXTREMES), pytest.param(TORCH, id="torch")])
def test_greedy_copied_beginnings_of_blocks_match_reference(
    golden: Golden, mode: dict[str, Any]
) -> None:
    """The second prompts end within the first block of the first ones, and take a copy of it."""
    distinct = Golden(golden.folder, golden.cases[-2:])
    driver = Driver(golden.folder, **mode, block_size=64)
    own = [len(case.prompt_ids) for case in distinct.cases]
    for length, hits in ((60, 0), (50, 2 * 48), (30, 2 * 48 + 2 * 16)):
        check(distinct, driver, [(length - prompt, 20) for prompt in own])
        assert driver.stats.prefix_hits == hits


@modes
@pytest.mark.variants(1)
def test_greedy_prefix_hits_under_eviction_match_reference(
    llama: Golden, mode: dict[str, Any]
) -> None:
    """The cache has fewer blocks than the prompts, so that hits and evictions alternate."""
    driver = Driver(
        llama.folder, **mode, block_size=16, num_gpu_blocks_override=14, max_model_len=192
    )
    for start in (0, 40, 0, 20):
        check(llama, driver, [(start + (n * 11) % 50, 20) for n in range(8)])
    assert driver.stats.prefix_hits > 0
    assert driver.stats.preemptions > 0


@modes
@pytest.mark.variants(1)
def test_greedy_requests_arriving_during_decode_match_reference(
    llama: Golden, mode: dict[str, Any]
) -> None:
    """Prompts that arrive during decode are prefilled in chunks in the same steps."""
    driver = Driver(llama.folder, **mode, max_num_batched_tokens=16)
    due = {}
    for number, (at, count) in enumerate(MIXED):
        case = llama.cases[number % len(llama.cases)].after(at, count)
        due[driver.submit(case.prompt_ids, count)] = case.ids
        driver.turn(1 + number % 3)
    driver.run()
    assert {i: driver.tokens(i) for i in due} == due
