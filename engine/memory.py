"""How many KV blocks there will be, and how long a sequence may get in them."""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.protocol import KVGroup

SHARE_OF_FREE = 4  # on a CPU, at most a quarter of the free memory becomes KV cache


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """What a model will take on its device."""

    taken: Mapping[str, int]  # bytes by what takes them
    available: int  # bytes free before anything is loaded
    num_blocks: int
    max_model_len: int


def plan_blocks(
    config: EngineConfig,
    groups: Sequence[KVGroup],
    block_bytes: int,
    *,
    max_model_len: int,
    step_tokens: int,
    available: int,
) -> tuple[int, int]:
    """(usable KV blocks, longest sequence in tokens); `available` and `block_bytes` in bytes.

    An encoder has no KV groups and needs no blocks.

    Where the model's own context does not fit and none was asked for, the longest that fits is
    served. Raises ConfigError, with numbers to use instead, where the one asked for does not fit.
    """

    def needed(tokens: int) -> int:
        return sum(g.most_blocks(tokens, step_tokens, config.block_size) for g in groups)

    if not groups:
        return 0, max_model_len
    per_sequence = needed(max_model_len)
    if config.num_gpu_blocks_override is not None:
        blocks, limit = config.num_gpu_blocks_override, "--num-gpu-blocks-override"
    elif config.kv_cache_memory_bytes is not None:
        blocks, limit = config.kv_cache_memory_bytes // block_bytes, "--kv-cache-memory-bytes"
    else:
        affordable = available // SHARE_OF_FREE // block_bytes
        blocks, limit = min(affordable, config.max_num_seqs * per_sequence), "the free memory"
    if blocks >= per_sequence:
        return blocks, max_model_len
    lengths = range(config.block_size, max_model_len, config.block_size)
    fitting = bisect.bisect_right(lengths, blocks, key=needed) * config.block_size
    if config.max_model_len is None and fitting:
        return blocks, fitting
    shorter = f"--max-model-len {fitting} or " if fitting else ""
    larger = f"--kv-cache-memory-bytes {per_sequence * block_bytes}"
    if config.num_gpu_blocks_override is not None:  # it overrides the bytes
        larger = f"--num-gpu-blocks-override {per_sequence}"
    raise ConfigError(
        f"A sequence of {max_model_len} tokens needs {per_sequence} KV blocks "
        f"({per_sequence * block_bytes / 2**20:.1f} MiB), but {limit} gives {blocks}. "
        f"Use {shorter}{larger}."
    )
