"""Models that load, models that leave for others, and the waits of requests."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from server.http.errors import ApiError
from server.models import pool as pool_module
from tests.support.fake_models import FakeModel, Fleet, spec_of
from tests.support.rig import eventually


async def use(fleet: Fleet, name: str) -> None:
    fleet.pool.release(await fleet.pool.lease(fleet.spec(name)))


async def test_requests_at_once_load_a_model_once(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    await asyncio.gather(*[use(fleet, "a") for _ in range(5)])
    assert len(fleet.models) == 1
    assert fleet.count("penstock:model_load_seconds_count") == 1
    await fleet.pool.close()
    assert fleet.models[0].was_stopped


async def test_least_recently_used_model_leaves_for_another(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b", "c")
    for name in ("a", "b", "a", "c"):
        await use(fleet, name)
    assert fleet.running() == ["a", "c"]
    assert fleet.count("penstock:parent_model_unloads_total") == 1
    assert fleet.pool.used <= 2 << 30
    await fleet.pool.close()


async def test_model_with_open_request_never_leaves(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b", "c")
    old = await fleet.pool.lease(fleet.spec("a"))
    await use(fleet, "b")
    await use(fleet, "c")
    assert fleet.running() == ["a", "c"]
    fleet.pool.release(old)
    await fleet.pool.close()


async def test_model_that_runs_a_batch_stays(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b", "c")
    await use(fleet, "a")
    fleet.models[0].server_load = 3
    await use(fleet, "b")
    await use(fleet, "c")
    assert fleet.running() == ["a", "c"]
    await fleet.pool.close()


async def test_new_requests_of_a_busy_model_wait_so_that_another_gets_its_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "HOLD_AFTER_S", 0.02)
    monkeypatch.setattr(pool_module, "LOOK_S", 0.01)
    fleet = Fleet(tmp_path, "a", "b", memory=1 << 30)
    is_over = False

    async def keep_busy() -> None:
        while not is_over:
            lease = await fleet.pool.lease(fleet.spec("a"))
            await asyncio.sleep(0.005)
            fleet.pool.release(lease)

    crowd = [asyncio.create_task(keep_busy()) for _ in range(4)]
    await asyncio.sleep(0.05)
    async with asyncio.timeout(10):
        await use(fleet, "b")
    is_over = True
    await asyncio.gather(*crowd)
    assert fleet.count("penstock:parent_model_unloads_total") >= 1
    await fleet.pool.close()


async def test_request_past_the_limit_gets_a_503_with_the_wait(tmp_path: Path) -> None:
    def is_slow(model: FakeModel) -> None:
        model.load_may_end.clear()

    fleet = Fleet(tmp_path, "a", load_timeout=0.05, prepare=is_slow)
    with pytest.raises(ApiError, match=r"not loaded within 0.05 s \(--load-timeout\)") as raised:
        await fleet.pool.lease(fleet.spec("a"))
    assert (raised.value.status, raised.value.headers["retry-after"]) == (503, "10")
    fleet.models[0].load_may_end.set()  # the load goes on, for the next request
    async with asyncio.timeout(10):
        while not fleet.running():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    await use(fleet, "a")
    assert len(fleet.models) == 1
    await fleet.pool.close()


async def test_requests_that_leave_the_queue_load_nothing(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b", memory=1 << 30, load_timeout=0.3)
    lease = await fleet.pool.lease(fleet.spec("a"))
    with pytest.raises(ApiError, match="was not loaded within"):
        await fleet.pool.lease(fleet.spec("b"))
    fleet.pool.release(lease)
    await asyncio.sleep(pool_module.LOOK_S + 0.1)
    assert [model.spec.name for model in fleet.models] == ["a"]
    await use(fleet, "a")
    await fleet.pool.close()


async def test_model_above_the_memory_is_refused_and_the_log_says_why(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "huge", "a")
    await use(fleet, "a")
    for _ in range(2):  # the second time without a plan
        with pytest.raises(ApiError) as raised:
            await fleet.pool.lease(fleet.spec("huge"))
        assert (raised.value.status, raised.value.code) == (503, "model_not_loaded")
    assert f"needs {3 << 30} bytes by --plan" in "".join(fleet.said)
    assert fleet.running() == ["a"]
    assert fleet.count("penstock:parent_model_load_failures_total") == 1
    await fleet.pool.close()


async def test_failed_load_gives_its_memory_back(tmp_path: Path) -> None:
    def fails(model: FakeModel) -> None:
        model.fails = "damaged" if model.spec.name == "a" else ""

    fleet = Fleet(tmp_path, "a", "b", memory=1 << 30, prepare=fails)
    with pytest.raises(ApiError, match="a could not be loaded"):
        await fleet.pool.lease(fleet.spec("a"))
    await use(fleet, "b")
    assert fleet.models[0].was_stopped
    assert fleet.pool.used == 1 << 30
    await fleet.pool.close()


async def test_model_that_died_is_loaded_by_its_next_request(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a", "b")
    await use(fleet, "a")
    await use(fleet, "b")
    await fleet.models[0].die()
    await asyncio.sleep(0.01)
    assert fleet.running() == ["b"]
    await use(fleet, "a")
    assert [model.spec.name for model in fleet.models] == ["a", "b", "a"]
    assert fleet.count("penstock:parent_model_crashes_total") == 1
    assert not fleet.models[1].was_stopped
    await fleet.pool.close()


async def test_model_without_requests_leaves_after_its_keep_alive(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "stays")
    fleet.catalog.add(spec_of("leaves", fleet.config, keep_alive=60))
    await use(fleet, "stays")
    await use(fleet, "leaves")
    now = asyncio.get_running_loop().time()
    await fleet.pool.unload_old(now + 59)
    assert fleet.running() == ["leaves", "stays"]
    await fleet.pool.unload_old(now + 61)
    assert fleet.running() == ["stays"]
    await fleet.pool.close()


async def test_random_requests_keep_the_memory_bound_and_all_are_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool_module, "HOLD_AFTER_S", 0.01)
    monkeypatch.setattr(pool_module, "LOOK_S", 0.005)
    fleet = Fleet(tmp_path, "a", "b", "c")
    dice = random.Random(0)

    async def client() -> None:
        for _ in range(5):
            lease = await fleet.pool.lease(fleet.spec(dice.choice("abc")))
            assert lease.state == "loaded"
            assert not lease.server.was_stopped  # type: ignore[union-attr]
            assert fleet.pool.used <= 2 << 30
            await asyncio.sleep(dice.random() / 500)
            assert not lease.server.was_stopped  # type: ignore[union-attr]
            fleet.pool.release(lease)

    async with asyncio.timeout(60):
        await asyncio.gather(*[client() for _ in range(8)])
    assert fleet.pool.num_open == 0
    await fleet.pool.close()
    assert fleet.pool.used == 0
    assert all(model.was_stopped for model in fleet.models)


async def test_model_with_an_open_request_is_unloaded_at_its_end(tmp_path: Path) -> None:
    fleet = Fleet(tmp_path, "a")
    lease = await fleet.pool.lease(fleet.spec("a"))
    await fleet.pool.unload(fleet.spec("a"))
    assert fleet.running() == ["a"]
    fleet.pool.release(lease)
    await eventually(lambda: fleet.count("penstock:parent_model_unloads_total") == 1, "it leaves")
    assert fleet.models[0].was_stopped
    await use(fleet, "a")  # it may be loaded again, and stays
    await fleet.pool.unload_old(0)
    assert fleet.running() == ["a"]
    await fleet.pool.close()
