"""The KV cache of a CPU takes memory as it is written to, not when it is made."""

from __future__ import annotations

import pytest
import torch

from engine.attention.kv_cache import KVCache
from engine.attention.spec import AttentionSpec
from engine.device.limits import resident_memory
from engine.ops.untouched import untouched_zeros

CPU = torch.device("cpu")
MIB = 1 << 20


def test_cache_takes_memory_as_its_blocks_are_written() -> None:
    before = resident_memory()
    layers = [AttentionSpec(2, 2, 64, scale=1.0)] * 4
    cache = KVCache(layers, 4096, 64, torch.float32, CPU)
    assert cache.num_bytes > 1024 * MIB
    assert resident_memory() - before < 64 * MIB, "mapped, not touched"
    cache.layers[0].keys[1:1025] = 1
    written = cache.layers[0].keys[1:1025].nbytes
    assert written <= resident_memory() - before < written + 64 * MIB
    assert not cache.layers[0].values[1:1025].any(), "a mapped page reads as zeros"


def test_memory_of_a_dropped_cache_is_given_back() -> None:
    before = resident_memory()
    zeros = untouched_zeros((256, MIB), torch.int8, CPU)
    zeros.fill_(1)
    assert resident_memory() - before > 200 * MIB
    del zeros
    assert resident_memory() - before < 64 * MIB


def test_cache_that_cannot_be_mapped_raises_memory_error() -> None:
    with pytest.raises(MemoryError, match=f"{1 << 60} bytes of cache cannot be mapped"):
        untouched_zeros((1 << 60,), torch.int8, CPU)


def test_cache_without_blocks_is_empty() -> None:
    assert untouched_zeros((0, 8), torch.float32, CPU).shape == (0, 8)
