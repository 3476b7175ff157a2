"""Adapters are loaded and unloaded while the engine serves; the least recently used ones leave."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.errors import ConfigError
from engine.protocol.adapters import AdapterLoaded, LoadAdapter, UnloadAdapter
from tests.support.adapters import ALL, PREFIX, folded, low_rank_tensors, random_adapter
from tests.support.adapters import write_adapter as write
from tests.support.driver import MODES, Driver, tiny_llama

PROMPT = list(range(40, 75))
COUNT = 10


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return [random_adapter(folder / f"a{n}", base, seed=n) for n in range(1, 5)]


@pytest.fixture(scope="module")
def due(
    base: Path, adapters: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> list[list[int]]:
    """The answers of the base model and of each adapter's merged model."""
    folder = tmp_path_factory.mktemp("merged")
    models = [base, *(folded(base, adapter, folder / adapter.name) for adapter in adapters)]
    return [answer(Driver(model)) for model in models]


def answer(driver: Driver, adapter: int = 0) -> list[int]:
    request_id = driver.submit(PROMPT, COUNT, adapter=adapter)
    driver.run()
    return driver.tokens(request_id)


def load(driver: Driver, adapter: int, path: Path) -> str:
    """Load an adapter; return why it was refused, or ""."""
    before = len(driver.sent)
    driver.inbox.append(LoadAdapter(1000 + adapter, adapter, str(path)))
    driver.run()
    [found] = [m for m in driver.sent[before:] if isinstance(m, AdapterLoaded)]
    assert found.id == 1000 + adapter
    return found.problem


@pytest.mark.parametrize("mode", [MODES["synchronous"], MODES["overlapped"], MODES["captured"]])
def test_more_adapters_than_slots_take_turns(
    base: Path, adapters: list[Path], due: list[list[int]], mode: dict[str, Any]
) -> None:
    modules = tuple(f"a{n}={folder}" for n, folder in enumerate(adapters, 1))
    driver = Driver(base, lora_modules=modules, max_loras=2, **mode)
    order = [3, 1, 4, 0, 2, 2, 1, 0, 4, 3, 3]
    ids = [driver.submit(PROMPT, COUNT, adapter=adapter) for adapter in order]
    driver.run()
    assert [driver.tokens(request_id) for request_id in ids] == [due[a] for a in order]


def test_request_without_adapter_overtakes_one_that_waits_for_a_slot(
    base: Path, adapters: list[Path]
) -> None:
    modules = tuple(f"a{n}={folder}" for n, folder in enumerate(adapters, 1))
    driver = Driver(base, lora_modules=modules, max_loras=1)
    first = driver.submit(PROMPT, 40, adapter=1)
    driver.turn(2)
    waiting = driver.submit(PROMPT, 2, adapter=2)
    behind = driver.submit(PROMPT, 2, adapter=1)
    overtaking = driver.submit(PROMPT, 2)
    driver.turn(5)
    assert driver.finish(overtaking) == "length"
    assert driver.core.scheduler.waiting.reason == "adapter"
    assert not driver.tokens(waiting)
    assert not driver.tokens(behind), "adapter 1 would never leave its slot"
    driver.run()
    assert list(driver.admissions) == [first, overtaking, waiting, behind]


def test_adapter_loaded_while_a_request_runs_serves_at_once(
    base: Path, adapters: list[Path], due: list[list[int]]
) -> None:
    driver = Driver(base, max_loras=2)
    running = driver.submit(PROMPT, COUNT)
    driver.turn(2)
    assert load(driver, 1, adapters[0]) == ""
    assert answer(driver, 1) == due[1]
    assert driver.tokens(running) == due[0]


def test_unloaded_adapter_finishes_its_requests_and_takes_no_more(
    base: Path, adapters: list[Path], due: list[list[int]]
) -> None:
    driver = Driver(base, max_loras=1, max_num_seqs=1)
    load(driver, 1, adapters[0])
    ids = [driver.submit(PROMPT, COUNT, adapter=1) for _ in range(2)]
    driver.turn(2)
    driver.inbox.append(UnloadAdapter(1))
    driver.turn()
    refused = driver.submit(PROMPT, COUNT, adapter=1)
    driver.run()
    assert [driver.tokens(request_id) for request_id in ids] == [due[1]] * 2
    assert (driver.rejected[refused].code, driver.rejected[refused].param) == (
        "model_not_found",
        "model",
    )
    assert load(driver, 2, adapters[1]) == "", "its slot is free"
    assert answer(driver, 2) == due[2]


def test_adapter_replaced_under_its_name_hits_no_prefix_of_the_old_one(
    base: Path, adapters: list[Path], due: list[list[int]], tmp_path: Path
) -> None:
    folder = tmp_path / "same"
    driver = Driver(base, max_loras=1, block_size=16)
    for adapter in (1, 2):
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(adapters[adapter - 1], folder)
        assert load(driver, adapter, folder) == ""
        assert answer(driver, adapter) == due[adapter]
        driver.inbox.append(UnloadAdapter(adapter))
        driver.run()
    assert [driver.cached_tokens(request_id) for request_id in (1, 2)] == [0, 0]


def test_adapter_whose_files_changed_after_it_left_is_refused(
    base: Path, adapters: list[Path], tmp_path: Path
) -> None:
    folder = tmp_path / "changing"
    shutil.copytree(adapters[0], folder)
    driver = Driver(base, max_loras=1)
    load(driver, 1, folder)
    load(driver, 2, adapters[1])  # it takes the slot
    write(folder, low_rank_tensors(base, 8, seed=9), lora_alpha=11)
    request_id = driver.submit(PROMPT, COUNT, adapter=1)
    driver.run()
    assert "have changed since the adapter was loaded" in driver.rejected[request_id].message
    assert load(driver, 3, folder) == ""


def test_adapter_that_does_not_fit_the_model_is_refused(base: Path, tmp_path: Path) -> None:
    driver = Driver(base, max_loras=1, max_lora_rank=8)
    wide = tiny_llama(tmp_path / "wide", hidden_size=64)
    problems = [
        load(driver, place, folder)
        for place, folder in enumerate(
            [
                random_adapter(tmp_path / "a", base, rank=9),
                random_adapter(tmp_path / "b", wide, rank=4, modules=ALL[:1]),
                write(tmp_path / "c", renamed(low_rank_tensors(base, 4, 0, ALL[:1]))),
                tmp_path,
            ],
            1,
        )
    ]
    assert "has rank 9 in model.layers.0" in problems[0]
    assert "--max-lora-rank is 8" in problems[0]
    assert "of shape [64, 64] in model.layers.0.self_attn.q_proj" in problems[1]
    assert "this model's has [32, 32]" in problems[1]
    assert "model.layers.0.self_attn.query, which is no linear layer of this model" in problems[2]
    assert "its layers are down_proj, gate_proj" in problems[2]
    assert "has no adapter_config.json" in problems[3]


def renamed(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name.replace("q_proj", "query"): tensor for name, tensor in tensors.items()}


def test_load_without_slots_is_refused(base: Path, adapters: list[Path]) -> None:
    assert "start it with --max-loras" in load(Driver(base), 1, adapters[0])


def test_adapters_at_start_are_checked(base: Path, adapters: list[Path], tmp_path: Path) -> None:
    bad = write(tmp_path / "bad", {f"{PREFIX}x.lora_A.weight": low_rank_of(base)})
    with pytest.raises(ConfigError, match=r"--lora-modules bad: .*has no lora_B of x"):
        Driver(base, lora_modules=(f"bad={bad}",))
    with pytest.raises(ConfigError, match=r"--lora-modules a: .*--max-lora-rank is 4"):
        Driver(base, lora_modules=(f"a={adapters[0]}",), max_lora_rank=4)


def low_rank_of(base: Path) -> Any:
    return next(iter(low_rank_tensors(base, 4, 0).values()))
