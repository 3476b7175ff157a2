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


def margin(config: EngineConfig, total: int | None) -> int:
    """Bytes of a GPU that are left alone."""
    return 0 if total is None else int(total * (1 - config.gpu_memory_utilization))


def check_weights(size: int, free: int, total: int | None) -> None:
    """Raises ConfigError where a GPU of `total` bytes has too few `free` for weights of `size`. On
    a CPU, without a total, `free` is all the machine has: other programs may yet give it up."""
    if size > free:
        have = f"the machine has {free / 2**30:.1f}"
        if total is not None:
            have = f"{free / 2**30:.1f} of the GPU's {total / 2**30:.1f} GiB are free"
        raise ConfigError(
            f"The weights take {size / 2**30:.1f} GiB, but {have}. Serve a smaller model, or take "
            f"a {'machine' if total is None else 'GPU'} that has more."
        )


def spare_for_kv(config: EngineConfig, free: int, total: int | None, reserved: int) -> int:
    """Of `free` bytes, those that may become KV cache; `reserved` ones are needed beside it.

    `total` is what a GPU has in all, None on a CPU: there other programs want their share, too.
    """
    spare = max(free - reserved - margin(config, total), 0)
    return spare // SHARE_OF_FREE if total is None else spare


def plan_blocks(
    config: EngineConfig,
    groups: Sequence[KVGroup],
    block_bytes: int,
    *,
    max_model_len: int,
    step_tokens: int,
    spare: int,
    most: int,
    fill: bool = False,
) -> tuple[int, int]:
    """(usable KV blocks, longest sequence in tokens); `spare`, `most` and `block_bytes` in bytes.

    An encoder has no KV groups and needs no blocks. With `fill` all of `spare` is taken, for the
    prefix cache, else no more than `max_num_seqs` sequences of full length can use.

    Where the model's own context does not fit and none was asked for, the longest that fits is
    served. Raises ConfigError, with numbers to use instead, where the one asked for does not fit,
    and where a size was asked for that is beyond `most`, which the device could ever give.
    """

    def needed(tokens: int) -> int:
        return sum(g.max_blocks(tokens, step_tokens, config.block_size) for g in groups)

    if not groups:
        return 0, max_model_len
    per_sequence = needed(max_model_len)
    if config.num_gpu_blocks_override is not None:
        blocks, limit = config.num_gpu_blocks_override, "--num-gpu-blocks-override"
    elif config.kv_cache_memory_bytes is not None:
        blocks, limit = config.kv_cache_memory_bytes // block_bytes, "--kv-cache-memory-bytes"
    else:
        blocks, limit = spare // block_bytes, "the free memory"
        if fill:
            limit = f"--gpu-memory-utilization {config.gpu_memory_utilization}"
        else:
            blocks = min(blocks, config.max_num_seqs * per_sequence)
    if blocks * block_bytes > most:
        raise ConfigError(
            f"{limit} asks for {blocks} KV blocks ({blocks * block_bytes / 2**30:.1f} GiB), but "
            f"there are {most / 2**30:.1f} GiB of memory. Ask for less, or leave the flag out: "
            "what is free then decides."
        )
    if blocks >= per_sequence:
        return blocks, max_model_len
    lengths = range(config.block_size, max_model_len, config.block_size)
    fitting = bisect.bisect_right(lengths, blocks, key=needed) * config.block_size
    if config.max_model_len is None and fitting:
        return blocks, fitting
    advice = [f"--max-model-len {fitting}"] if fitting else []
    if per_sequence * block_bytes <= most:
        larger = f"--kv-cache-memory-bytes {per_sequence * block_bytes}"
        if config.num_gpu_blocks_override is not None:  # it overrides the bytes
            larger = f"--num-gpu-blocks-override {per_sequence}"
        advice.append(larger)
    raise ConfigError(
        f"A sequence of {max_model_len} tokens needs {per_sequence} KV blocks "
        f"({per_sequence * block_bytes / 2**20:.1f} MiB), but {limit} gives {blocks}. "
        f"Use {' or '.join(advice) or 'more memory'}."
    )
