"""The KV budget: how many KV blocks there will be, and how long a sequence may become in them."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.protocol.ready import KVGroup

# On a CPU, the part of the free memory that may become KV cache. A machine's memory is shared with
# other programs and servers. The memory of a container is this server's own.
SHARE_OF_MACHINE, SHARE_OF_CONTAINER = 8, 2


def margin(config: EngineConfig, total: int | None) -> int:
    """Return the bytes of a GPU with `total` bytes that stay unused; 0 on a CPU (None)."""
    return 0 if total is None else int(total * (1 - config.gpu_memory_utilization))


def check_weights(size: int, free: int, total: int | None) -> None:
    """Raises ConfigError if weights of `size` bytes do not fit into `free`.

    On a GPU, `free` of its `total` bytes are free. On a CPU `total` is None and `free` is all that
    the machine has, because other programs may still give memory back.
    """
    if size <= free:
        return
    if total is None:
        have, device = f"the machine has {_gib(free)}", "machine"
    else:
        have, device = f"{_gib(free)} of the GPU's {_gib(total)} GiB are free", "GPU"
    raise ConfigError(
        f"The weights take {_gib(size)} GiB, but {have}. Serve a smaller model, or use a {device} "
        "with more memory."
    )


def spare_for_kv(
    config: EngineConfig, free: int, total: int | None, reserved: int, *, is_limited: bool = False
) -> int:
    """Return how many of `free` bytes may become KV cache; `reserved` are needed besides it.

    `total` is the size of a GPU. It is None for a CPU, where `is_limited` says whether a container
    or ulimit limits this server's memory.
    """
    spare = max(free - reserved - margin(config, total), 0)
    if total is not None:
        return spare
    return spare // (SHARE_OF_CONTAINER if is_limited else SHARE_OF_MACHINE)


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
    """Return (usable KV blocks, longest sequence in tokens). Sizes are in bytes.

    Without a configured size, `spare` bytes become blocks: all of them with `fill`, so that the
    prefix cache gets the rest, else at most what `max_num_seqs` sequences of full length can use.
    An encoder has no KV groups and needs no blocks.

    If the model's own context does not fit, the longest that fits is served. Raises ConfigError,
    with values that would work, if a configured context does not fit, or if a configured size is
    above `most`, which is all that the device could ever give.
    """
    if not groups:
        return 0, max_model_len

    def needed(tokens: int) -> int:
        return sum(g.max_blocks(tokens, step_tokens, config.block_size) for g in groups)

    per_sequence = needed(max_model_len)
    blocks, limit = _configured_blocks(config, block_bytes)
    if blocks is None:
        blocks = spare // block_bytes
        if fill:
            limit = f"--gpu-memory-utilization {config.gpu_memory_utilization}"
        else:
            blocks = min(blocks, config.max_num_seqs * per_sequence)
    if blocks * block_bytes > most:
        raise ConfigError(
            f"{limit} requests {blocks} KV blocks ({_gib(blocks * block_bytes)} GiB), but the "
            f"memory has {_gib(most)} GiB. Lower it, or leave the flag out to use free memory."
        )
    if blocks >= per_sequence:
        return blocks, max_model_len
    lengths = range(config.block_size, max_model_len, config.block_size)
    fitting = bisect.bisect_right(lengths, blocks, key=needed) * config.block_size
    if config.max_model_len is None and fitting:
        return blocks, fitting
    advice = [f"--max-model-len {fitting}"] if fitting else []
    if per_sequence * block_bytes <= most:
        advice.append(_flag_for(config, per_sequence, block_bytes))
    raise ConfigError(
        f"A sequence of {max_model_len} tokens needs {per_sequence} KV blocks "
        f"({per_sequence * block_bytes / 2**20:.1f} MiB), but {limit} gives {blocks}. "
        f"Use {' or '.join(advice) or 'more memory'}."
    )


def _configured_blocks(config: EngineConfig, block_bytes: int) -> tuple[int | None, str]:
    """Return the configured number of blocks, if any, and what limits the number."""
    if config.num_gpu_blocks_override is not None:
        return config.num_gpu_blocks_override, "--num-gpu-blocks-override"
    if config.kv_cache_memory_bytes is not None:
        return config.kv_cache_memory_bytes // block_bytes, "--kv-cache-memory-bytes"
    return None, "the free memory"


def _flag_for(config: EngineConfig, blocks: int, block_bytes: int) -> str:
    """Return the flag that gives `blocks` blocks; the number of blocks overrides the bytes."""
    if config.num_gpu_blocks_override is not None:
        return f"--num-gpu-blocks-override {blocks}"
    return f"--kv-cache-memory-bytes {blocks * block_bytes}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"
