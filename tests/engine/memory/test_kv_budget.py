"""Number of KV blocks, and that the advice in a refusal works."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.memory.kv_budget import check_weights, plan_blocks, spare_for_kv
from engine.protocol.ready import KVGroup
from tests.support.thorough import examples


def plan(available: int = 10**9, max_model_len: int = 1000, **config: Any) -> tuple[int, int]:
    """Plan with blocks of 64 tokens and 1000 bytes."""
    return plan_for(EngineConfig(**config), 1000, max_model_len, available)


def plan_for(
    config: EngineConfig,
    block_bytes: int,
    max_model_len: int,
    available: int,
    groups: tuple[KVGroup, ...] = (KVGroup(1),),
    most: int = 10**14,
) -> tuple[int, int]:
    return plan_blocks(
        config,
        groups,
        block_bytes,
        max_model_len=max_model_len,
        step_tokens=100,
        spare=spare_for_kv(config, available, None, 0),
        most=most,
    )


def test_plan_default_fits_all_sequences_or_takes_an_eighth_of_memory() -> None:
    assert plan(max_num_seqs=8) == (8 * 16, 1000)
    assert plan(available=800_000, max_num_seqs=8) == (100, 1000)


def test_spare_of_container_is_half_of_what_the_model_leaves() -> None:
    config = EngineConfig()
    assert spare_for_kv(config, 9_000, None, 1_000, is_limited=False) == 1_000
    assert spare_for_kv(config, 9_000, None, 1_000, is_limited=True) == 4_000
    assert spare_for_kv(config, 9_000, None, 10_000, is_limited=True) == 0


def test_plan_gpu_fills_memory_up_to_its_utilization() -> None:
    config = EngineConfig(gpu_memory_utilization=0.75, max_num_seqs=1)
    spare = spare_for_kv(config, free=9_000, total=10_000, reserved=500)
    assert spare == 9_000 - 500 - 2_500
    on_gpu: dict[str, Any] = {"step_tokens": 64, "most": 9_000, "fill": True}
    blocks, _ = plan_blocks(config, (KVGroup(1),), 10, max_model_len=64, spare=spare, **on_gpu)
    assert blocks == spare // 10, "more than one sequence needs, for the prefix cache"
    assert spare_for_kv(config, free=2_900, total=10_000, reserved=500) == 0
    asked = msgspec.structs.replace(config, max_model_len=128)
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization 0\.75 gives 1\. Use"):
        plan_blocks(asked, (KVGroup(1),), 10, max_model_len=128, spare=19, **on_gpu)


def test_check_weights_too_large_for_device_is_refused() -> None:
    check_weights(80 << 30, free=80 << 30, total=80 << 30)
    with pytest.raises(ConfigError, match=r"take 140\.0 GiB, but 79\.0 of the GPU's 80\.0 GiB are"):
        check_weights(140 << 30, free=79 << 30, total=80 << 30)
    check_weights(24 << 30, free=24 << 30, total=None)
    with pytest.raises(ConfigError, match=r"take 140\.0 GiB, but the machine has 24\.0\. Serve"):
        check_weights(140 << 30, free=24 << 30, total=None)


def test_plan_given_bytes_or_override_is_exact() -> None:
    assert plan(kv_cache_memory_bytes=77_999) == (77, 1000)
    assert plan(num_gpu_blocks_override=31, kv_cache_memory_bytes=10**9) == (31, 1000)
    assert plan(available=0, num_gpu_blocks_override=31) == (31, 1000)


def test_plan_default_context_shrinks_to_fit() -> None:
    assert plan(num_gpu_blocks_override=15) == (15, 15 * 64)
    assert plan(num_gpu_blocks_override=16) == (16, 1000)
    assert plan(available=80_000) == (10, 640)


@pytest.mark.parametrize(
    ("config", "limit"),
    [
        ({"num_gpu_blocks_override": 15}, "--num-gpu-blocks-override gives 15"),
        ({"kv_cache_memory_bytes": 15_999}, "--kv-cache-memory-bytes gives 15"),
        ({"available": 120_000}, "the free memory gives 15"),
    ],
    ids=str,
)
def test_plan_given_context_too_long_is_refused(config: dict[str, Any], limit: str) -> None:
    available = config.pop("available", 10**9)
    wanted = EngineConfig(max_model_len=1000, **config)
    with pytest.raises(ConfigError, match=f"1000 tokens needs 16 KV blocks .*{limit}"):
        plan_for(wanted, 1000, 1000, available)


@pytest.mark.parametrize(
    "config",
    [{"kv_cache_memory_bytes": 100_001 * 10**6}, {"num_gpu_blocks_override": 100_001}],
    ids=str,
)
def test_plan_more_than_total_memory_is_refused(config: dict[str, Any]) -> None:
    """Memory that is only not free now is allowed: the page cache is released when needed."""
    asked = EngineConfig(**config)
    [flag] = config
    assert plan_for(asked, 10**6, 1000, 0, most=100_001 * 10**6) == (100_001, 1000)
    name = flag.replace("_", "-")
    words = rf"--{name} requests 100001 KV blocks \(93\.1 GiB\), but the memory has 93"
    with pytest.raises(ConfigError, match=words):
        plan_for(asked, 10**6, 1000, 10**9, most=100_001 * 10**6 - 1)


def test_plan_context_beyond_total_memory_advises_no_larger_cache() -> None:
    wanted = EngineConfig(max_model_len=10**6)
    with pytest.raises(ConfigError, match=r"\. Use --max-model-len 6400\.$"):
        plan_for(wanted, 1000, 10**6, 800_000, most=10**6)


@settings(derandomize=True, max_examples=examples(200), deadline=None)
@given(
    block_size=st.sampled_from((16, 32, 64, 128)),
    block_bytes=st.integers(1, 10**7),
    length=st.integers(1, 10**6),
    available=st.integers(0, 10**12),
    asked=st.booleans(),
    kv_bytes=st.none() | st.integers(1, 10**10),
    override=st.none() | st.integers(1, 10**5),
    seqs=st.integers(1, 4096),
    windows=st.lists(st.none() | st.integers(1, 5000), min_size=1, max_size=3),
)
def test_plan_random_limits_served_length_always_fits(
    block_size: int,
    block_bytes: int,
    length: int,
    available: int,
    asked: bool,
    kv_bytes: int | None,
    override: int | None,
    seqs: int,
    windows: list[int | None],
) -> None:
    groups = tuple(KVGroup(1, window) for window in windows)
    config = EngineConfig(
        block_size=block_size,
        max_model_len=length if asked else None,
        kv_cache_memory_bytes=kv_bytes,
        num_gpu_blocks_override=override,
        max_num_seqs=seqs,
    )
    try:
        blocks, served = plan_for(config, block_bytes, length, available, groups)
    except ConfigError as error:
        for advised in follow(config, str(error)):
            plan_for(advised, block_bytes, advised.max_model_len or length, available, groups)
        return
    assert served > 0
    assert sum(g.max_blocks(served, 100, block_size) for g in groups) <= blocks
    assert served == length or (not asked and served < length)
    assert blocks == override or blocks * block_bytes <= (kv_bytes or available // 8)


def follow(config: EngineConfig, message: str) -> list[EngineConfig]:
    """Return the configurations that the refusal advises."""
    advice = re.findall(r"--([a-z-]+) (\d+)", message)
    assert advice
    return [
        msgspec.structs.replace(config, **{flag.replace("-", "_"): int(value)})
        for flag, value in advice
    ]
