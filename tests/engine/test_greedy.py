"""Greedy answers are those of the reference, whatever shares the step: the equalities of design 11.

`expected.json` was made by the reference implementation, one prompt at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.engine.driver import EAGER, EXTREMES, MODES, Driver, each
from tests.stories import Case, cases_of

modes = pytest.mark.parametrize("mode", each(EXTREMES))


@dataclass(frozen=True)
class Golden:
    folder: Path
    cases: list[Case]


def load(folder: Path) -> Golden:
    return Golden(folder, cases_of(folder))


@pytest.fixture
def llama(assets: Path) -> Golden:
    return load(assets / "checkpoints" / "stories260K-llama")


@pytest.fixture(params=["stories260K-llama", "stories280K-gpt2"])
def golden(assets: Path, request: pytest.FixtureRequest) -> Golden:
    return load(assets / "checkpoints" / request.param)


def check(golden: Golden, driver: Driver, requests: list[tuple[int, int]]) -> None:
    """Submit at once the given (cut, count) of the cases by turns, and compare everything."""
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


def test_alone(golden: Golden) -> None:
    driver = Driver(golden.folder)
    for case in golden.cases:
        check(Golden(golden.folder, [case]), driver, [(0, 120)])


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_32_at_once_of_mixed_lengths(golden: Golden, mode: dict[str, Any]) -> None:
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
def test_no_setting_changes_a_token(
    llama: Golden, mode: dict[str, Any], config: dict[str, Any]
) -> None:
    driver = Driver(llama.folder, **mode, **config)
    check(llama, driver, MIXED)
    long_enough = config.get("enable_prefix_caching", True) and config.get("block_size") != 128
    assert (driver.stats.prefix_hits > 0) == long_enough


@modes
@pytest.mark.parametrize(("budget", "prefix_caching"), [(8, True), (64, False)])
def test_preempted(golden: Golden, mode: dict[str, Any], budget: int, prefix_caching: bool) -> None:
    """Reliability T-16: so few blocks that sequences are computed several times over."""
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
def test_sharing_a_block_in_the_step_that_fills_it(llama: Golden, mode: dict[str, Any]) -> None:
    """The second prompt has the first one's two blocks, and its one token more comes before those
    with which the first fills the last of them."""
    case = next(case for case in llama.cases if len(case.prompt_ids) <= 32)
    at = 32 - len(case.prompt_ids)
    driver = Driver(llama.folder, **mode, block_size=16, max_num_batched_tokens=23)
    check(Golden(llama.folder, [case]), driver, [(at, 2), (at + 1, 20)])
    assert driver.stats.prefix_hits == 32


@modes
def test_prefix_hits(golden: Golden, mode: dict[str, Any]) -> None:
    """The same prompts cold, then from the cache, then beside each other."""
    distinct = Golden(golden.folder, golden.cases[-2:])
    requests = [(60, 20), (60, 20)]
    driver = Driver(golden.folder, **mode, block_size=16)
    check(distinct, driver, requests)
    assert driver.stats.prefix_hits == 0
    check(distinct, driver, requests)
    assert driver.stats.prefix_hits == 2 * 64
    check(distinct, driver, [*requests, (70, 20), (70, 20), (90, 20), (50, 40)])
    assert driver.stats.prefix_hits >= 2 * 64 + 6 * 48


@modes
def test_hits_under_eviction(llama: Golden, mode: dict[str, Any]) -> None:
    """The cache holds fewer blocks than the prompts have, so hits and evictions mix."""
    driver = Driver(
        llama.folder, **mode, block_size=16, num_gpu_blocks_override=14, max_model_len=192
    )
    for start in (0, 40, 0, 20):
        check(llama, driver, [(start + (n * 11) % 50, 20) for n in range(8)])
    assert driver.stats.prefix_hits > 0
    assert driver.stats.preemptions > 0


@modes
def test_arriving_one_by_one(llama: Golden, mode: dict[str, Any]) -> None:
    """Prompts that come while others decode are chunked beside them."""
    driver = Driver(llama.folder, **mode, max_num_batched_tokens=16)
    due = {}
    for number, (at, count) in enumerate(MIXED):
        case = llama.cases[number % len(llama.cases)].after(at, count)
        due[driver.submit(case.prompt_ids, count)] = case.ids
        driver.turn(1 + number % 3)
    driver.run()
    assert {i: driver.tokens(i) for i in due} == due
