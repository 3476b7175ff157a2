"""Several ranks serve adapters like one, and load and unload them in the same step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from engine.errors import ConfigError
from engine.models.adapters import LoadedAdapter, ModelAdapters
from engine.protocol.adapters import UnloadAdapter
from tests.engine.runner.test_adapter_loading import load
from tests.engine.test_adapters import Adapted
from tests.support.driver import Driver
from tests.support.process import eventually
from tests.support.ranks import ThreadFollowers, ranked

pytestmark = pytest.mark.usefixtures("one_thread")
RANKS = (8, 3, 16, 24)
PAIRS = [(n % (len(RANKS) + 1), n % 12) for n in range(14)]


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"), RANKS)


def adapters_of(driver: Driver) -> list[ModelAdapters]:
    """The adapters of both ranks."""
    runners = cast(ThreadFollowers, driver.runner.followers).runners
    eventually(lambda: 1 in runners, "rank 1 is loaded")
    found = [driver.runner.adapters, runners[1].adapters]
    return [adapters for adapters in found if adapters is not None]


def num_filled(adapters: ModelAdapters) -> int:
    """Return how many slots of layers hold an adapter."""
    layers = cast(Any, adapters)._layers.values()
    return sum(pair is not None for layer in layers for pair in layer._pairs)


@pytest.mark.variants(1)
@pytest.mark.parametrize(
    ("size", "config"),
    [
        (2, {"max_num_batched_tokens": 24}),
        (2, {"prepack": False}),  # adapters in one tensor
        (4, {"attention_backend": "torch"}),  # two ranks keep the same KV head
    ],
    ids=["2", "2-stacked", "4"],
)
def test_ranks_with_more_adapters_than_slots_answer_like_one(
    adapted: Adapted, size: int, config: dict[str, Any], tmp_path: Path
) -> None:
    modules = tuple(f"a{n}={folder}" for n, folder in enumerate(adapted.folders, 1))
    config |= {"lora_modules": modules, "max_loras": 3}
    with ranked(adapted.base, tmp_path / "place", size, **config) as driver:
        adapted.check(driver, PAIRS)
        adapted.check(driver, [(4, 1), (4, 2), (1, 1)])


def test_ranks_load_and_unload_while_requests_run(adapted: Adapted, tmp_path: Path) -> None:
    with ranked(adapted.base, tmp_path / "place", max_loras=1, max_lora_rank=24) as driver:
        running = driver.submit([1, 2, 3], 100)
        driver.turn(2)
        assert load(driver, 1, adapted.folders[0]) == ""
        adapted.check(driver, [(1, 1), (0, 1)])
        driver.inbox.append(UnloadAdapter(1))
        assert load(driver, 2, adapted.folders[1]) == ""
        adapted.check(driver, [(2, 1), (0, 1)])
        both = adapters_of(driver)
        assert all(map(num_filled, both))
        driver.inbox.append(UnloadAdapter(2))
        driver.run()
        assert len(driver.tokens(running)) == 100
        for adapters in both:
            eventually(lambda a=adapters: not num_filled(a), "an unloaded adapter takes no memory")


def raising(error: Exception) -> Callable[[LoadedAdapter], LoadedAdapter]:
    def fail(loaded: LoadedAdapter) -> LoadedAdapter:
        raise error

    return fail


def replaced(loaded: LoadedAdapter) -> LoadedAdapter:
    return replace(loaded, stored=replace(loaded.stored, stamp=((1, 2), (3, 4))))


@pytest.mark.parametrize(
    ("failing", "edit", "problem"),
    [
        (0, raising(ConfigError("no such file here")), "no such file here"),
        (1, raising(ConfigError("no such file here")), "no such file here"),
        (1, raising(ValueError("a mistake")), "a mistake"),
        (1, replaced, "changed while they were read"),
    ],
    ids=["rank 0", "rank 1", "mistake", "replaced"],
)
def test_load_that_fails_in_one_rank_fails_in_all(
    adapted: Adapted,
    failing: int,
    edit: Callable[[LoadedAdapter], LoadedAdapter],
    problem: str,
    tmp_path: Path,
) -> None:
    with ranked(adapted.base, tmp_path / "place", max_loras=1, max_lora_rank=24) as driver:
        adapters = adapters_of(driver)[failing]
        load_alone = adapters._load
        adapters._load = lambda path: edit(load_alone(path))  # type: ignore[method-assign]
        assert problem in load(driver, 1, adapted.folders[0])
        adapters._load = load_alone  # type: ignore[method-assign]
        assert load(driver, 2, adapted.folders[1]) == ""
        adapted.check(driver, [(2, 1), (0, 1)])
        eventually(lambda: not adapters._reads, "what failed is dropped")
