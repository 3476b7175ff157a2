"""The launch of `fused_decode.py`: a decode step's attention from projection to result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from engine.kernels.triton.attention_shapes import Features, keys_per_tile, padded
from engine.kernels.triton.chips import chip_of, features_of
from engine.kernels.triton.decode_turns import most_splits, split_blocks
from engine.kernels.triton.fused_decode import fused_decode_kernel
from engine.kernels.triton.overlap import launch_options
from engine.kernels.triton.rotary import NORMS

PROGRAMS_PER_SM = 3
# Of a thread: the most with which an SM holds PROGRAMS_PER_SM programs of four warps. ptxas aims at
# this number by itself, but spills some of them on the way unless it is set as a limit.
REGISTERS = 168
PROGRAMS = 8  # in Triton's interpreter
# Numbers of a head, and its bytes: rotating others spills registers, on sm_80 or on both.
FUSED_DIMS, FUSED_BYTES = (16, 32, 64, 128, 256), 512
MIN_SEQUENCES = 64  # fewer kernels are compiled if small batches share one
COUNTERS = 1 << 17  # one for each kv head of each sequence
LINE_BYTES = 128  # of the L2 cache


@dataclass(frozen=True, slots=True)
class Turn:
    """How heads are normed and rotated; the fields are those of `rotate` in rotary.py."""

    cos: torch.Tensor | None = None  # [T, 1, R]
    sin: torch.Tensor | None = None
    norm: str = "none"
    weights: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
    eps: float = 0.0
    offset: bool = False
    pairs: bool = False

    @property
    def constants(self) -> dict[str, Any]:
        return {
            "NORM": NORMS[self.norm],
            "OFFSET": int(self.offset),
            "PAIRS": self.pairs,
            "WIDTH": 0 if self.cos is None else self.cos.shape[-1],
        }


@dataclass(frozen=True, slots=True)
class Slots:
    """A layer's paged KV, and where the sequences of a step have theirs."""

    keys: torch.Tensor  # [blocks, Hkv, block_size, D]
    values: torch.Tensor  # the same
    tables: torch.Tensor  # [S, width] int64
    token_blocks: torch.Tensor  # [S] int64: the block of each sequence's newest key
    lengths: torch.Tensor  # [S] int32: keys with the newest one

    @property
    def max_keys(self) -> int:
        """The keys of a sequence that has all blocks of its table."""
        return self.tables.shape[1] * self.keys.shape[2]

    def constants(self, heads: int, window: int | None, tile_keys: int) -> dict[str, int | None]:
        """Return the constants of the kernel that these sizes and the query heads set."""
        _, kv_heads, block_size, dim = self.keys.shape
        blocks = None
        if tile_keys <= block_size:
            blocks = split_blocks(self.max_keys, window, block_size)
        return {
            "KV_HEADS": kv_heads,
            "SHARED": heads // kv_heads,
            "HEADS": triton.next_power_of_2(heads // kv_heads),
            "HEAD_DIM": dim,
            "DIMS": padded(dim),
            "BLOCKS": blocks,
            "BLOCK_SIZE": block_size,
        }


@dataclass(frozen=True, slots=True)
class DecodeTile:
    """Keys read at a time, warps, and the compiler's stages. A tile in flight takes one stage.

    `registers` is the most that a thread may use; None leaves the number to ptxas.
    """

    keys: int
    warps: int
    stages: int
    registers: int | None

    @property
    def options(self) -> dict[str, int | None]:
        """Return Triton's own arguments of a launch."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.registers}


def new_counters(device: torch.device) -> torch.Tensor:
    """Return the counters [COUNTERS] int32 of finished splits, which all launches share."""
    return torch.zeros(COUNTERS, dtype=torch.int32, device=device)


def fused_tile(head_dim: int, dtype: torch.dtype) -> DecodeTile:
    """Return the tile of a program. It must not depend on the batch, as the bits depend on it."""
    warps, registers = 4, None
    if head_dim > 64:  # smaller heads do not spill, and most need fewer registers
        if dtype.itemsize == 4:
            warps = 8  # with four, registers spill
        else:
            registers = REGISTERS
    return DecodeTile(keys_per_tile(head_dim, dtype), warps, 3, registers)


def num_programs(device: torch.device) -> int:
    """Return how many programs a launch has: as many as the device holds at once."""
    chip = chip_of(device)
    return PROGRAMS if chip is None else chip.num_sms * PROGRAMS_PER_SM


def to_fetch(
    weights: Sequence[torch.Tensor], budget: int
) -> tuple[list[torch.Tensor | None], list[int]]:
    """Return two weights, or None, and how many cache lines of each are fetched.

    At most `budget` bytes are fetched: all of the first weight before any of the second.
    """
    fetched: list[torch.Tensor | None] = [None, None]
    lines = [0, 0]
    for number, weight in enumerate(weights[:2]):
        lines[number] = min(weight.nbytes, budget) // LINE_BYTES
        budget -= lines[number] * LINE_BYTES
        if lines[number]:
            fetched[number] = weight
    return fetched, lines


def fused_decode_attention(
    out: torch.Tensor,
    qk: torch.Tensor,
    value: torch.Tensor,
    turn: Turn,
    slots: Slots,
    features: Features,
    counters: torch.Tensor,
    next_weights: Sequence[torch.Tensor] = (),
) -> None:
    """Store the keys and values of S new tokens and attend with them; write `out` [S, H, D].

    `qk` [S, H + Hkv, D] are their queries and keys, neither normed nor rotated, and `value` is
    [S, Hkv, D]. A sequence may have several tokens, one after the other: those behind the first
    are drafted. `features` have no bias. `counters` are 0 before and after the launch. Programs
    without work may fetch the start of `next_weights` into the L2 cache.
    """
    sequences, heads, dim = out.shape
    device, window = out.device, features.window
    assert sequences * slots.keys.shape[1] <= len(counters), "too many sequences for the counters"
    splits = most_splits(slots.max_keys, window)
    shape = (sequences, heads, splits) if splits > 1 else (0, 0, 0)
    partial = [torch.empty(*shape, size, device=device) for size in (dim, 2)]  # fp32
    tile = fused_tile(dim, out.dtype)
    budget = features_of(device).prefetch_bytes if device.type != "cpu" else 0
    weights, lines = to_fetch(next_weights, budget)
    fused_decode_kernel[(num_programs(device),)](
        out,
        *partial,
        counters,
        qk,
        value,
        *turn.weights,
        turn.cos,
        turn.sin,
        slots.keys,
        slots.values,
        slots.tables,
        slots.token_blocks,
        slots.lengths,
        features.sinks,
        *weights,
        turn.eps,
        features.scale,
        sequences,
        splits,
        *qk.stride()[:2],
        *value.stride()[:2],
        slots.tables.stride(0),
        *lines,
        SEQUENCES=max(triton.next_power_of_2(sequences), MIN_SEQUENCES),
        TILE=tile.keys,
        WINDOW=window,
        SOFTCAP=features.softcap,
        **slots.constants(heads, window, tile.keys),
        **turn.constants,
        **tile.options,
        **launch_options(device),
    )
