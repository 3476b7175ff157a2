"""Sums of several GPUs in one launch: each rank writes its part into the memory of the others.

A program of a rank writes its block of x into the buffers of the other ranks, and then a flag,
which it releases. The program with the same number of each other rank acquires the flag and reads.
Parts are added in fp32 in the order of the ranks. So the bits depend neither on the other rows nor
on which part came first.

Sums are numbered, and use two slots of the buffers in turn. A rank writes to a slot again after it
has got the flags of the next sum. The others sent these after they had read the slot, so no rank
needs to say that it has read. `tests/support/device_protocols.py` checks that in all interleavings.
Each program has a number, a block and flags of its own. So sums of different sizes may follow each
other, and the host, which replays graphs, need not know the number.

All programs of a rank must be on the device at once: they wait for programs of other ranks.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.triton.norm import scale_by_rms
from engine.kernels.triton.overlap import launch_options, wait_for_inputs

LIMIT = 512 << 10  # bytes of a rank's part. NCCL adds larger ones
BLOCK_BYTES = 2048  # of a program, if no norm follows
MAX_ROW_BYTES = 32 << 10  # of a sum that is normed: a program holds a row
SLOTS = 2  # a power of two
FLAG_BYTES = 4


class SumBuffers(NamedTuple):
    """The buffers of all ranks for sums whose programs take `block_bytes`.

    A rank's buffer has SLOTS slots of a block from each rank and program, and then as many flags.
    """

    own: int  # the number of this rank
    peers: torch.Tensor  # [ranks] int64: the address of each rank's buffer
    numbers: torch.Tensor  # [programs] int32: sums that each program of this rank has computed
    block_bytes: int

    @property
    def programs(self) -> int:
        return len(self.numbers)


def programs_of(block_bytes: int) -> int:
    """Return the most programs of a sum."""
    return LIMIT // block_bytes


def buffer_bytes(ranks: int, block_bytes: int) -> int:
    """Return the size of a rank's buffer. It must be zero before the first sum."""
    return SLOTS * ranks * programs_of(block_bytes) * (block_bytes + FLAG_BYTES)


@triton.jit
def _buffer(peers_ptr, rank, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, kind: tl.constexpr):
    """Return pointers to the data and the flags of a rank's buffer."""
    address = tl.load(peers_ptr + rank)
    data = tl.multiple_of(address.to(tl.pointer_type(kind)), 16)
    bytes_of_data: tl.constexpr = BLOCKS * BLOCK * kind.primitive_bitwidth // 8
    flags = (address + bytes_of_data).to(tl.pointer_type(tl.int32))
    return data, flags


@triton.jit
def _exchange(
    x,
    inside,
    peers_ptr,
    numbers_ptr,
    kind: tl.constexpr,
    OWN: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
):
    """Send this rank's block x [BLOCK], and return the sum of all ranks' blocks in fp32."""
    program = tl.program_id(0)
    number = tl.load(numbers_ptr + program) + 1
    at = tl.arange(0, BLOCK)
    blocks: tl.constexpr = SLOTS * RANKS * PROGRAMS
    # The number wraps around to negative ones, whose remainder would be negative too.
    first = (number & (SLOTS - 1)) * RANKS * PROGRAMS + program  # the block of rank 0
    if SENDS:
        for step in tl.static_range(1, RANKS):  # each rank begins with another one
            data, flags = _buffer(peers_ptr, (OWN + step) % RANKS, blocks, BLOCK, kind)
            tl.store(data + (first + OWN * PROGRAMS) * BLOCK + at, x, inside)
        tl.debug_barrier()  # one thread sets the flag, after the stores of all threads
        for step in tl.static_range(1, RANKS):
            data, flags = _buffer(peers_ptr, (OWN + step) % RANKS, blocks, BLOCK, kind)
            tl.atomic_xchg(flags + first + OWN * PROGRAMS, number, sem="release", scope="sys")
    total = x.to(tl.float32)
    if RECEIVES:
        data, flags = _buffer(peers_ptr, OWN, blocks, BLOCK, kind)
        for rank in tl.static_range(RANKS):
            if rank != OWN:
                flag = flags + first + rank * PROGRAMS
                # The sender waits for this rank before it uses the flag again, so it stays equal.
                while tl.atomic_cas(flag, number, number, sem="acquire", scope="sys") != number:
                    pass
        tl.debug_barrier()  # one thread has got the flags, before the loads of all threads
        for rank in tl.static_range(RANKS):
            part = x
            if rank != OWN:
                # Not from the L1 cache, which the writes of other GPUs do not reach.
                block = data + (first + rank * PROGRAMS) * BLOCK + at
                part = tl.load(block, inside, 0.0, cache_modifier=".cg")
            if rank == 0:
                total = part.to(tl.float32)
            else:
                total += part.to(tl.float32)
        tl.store(numbers_ptr + program, number)
    return total


@triton.jit
def _rank_sum_kernel(
    x_ptr,
    out_ptr,
    peers_ptr,
    numbers_ptr,
    size,
    OWN: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    kind: tl.constexpr = x_ptr.dtype.element_ty
    x = tl.load(x_ptr + at, inside, 0.0)
    total = _exchange(
        x,
        inside,
        peers_ptr,
        numbers_ptr,
        kind,
        OWN,
        RANKS,
        PROGRAMS,
        BLOCK,
        SLOTS,
        SENDS,
        RECEIVES,
    )
    if RECEIVES:
        tl.store(out_ptr + at, total.to(kind), inside)


@triton.jit
def _rank_sum_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    sum_ptr,
    out_ptr,
    peers_ptr,
    numbers_ptr,
    size,
    eps,
    OFFSET: tl.constexpr,
    OWN: tl.constexpr,
    RANKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
    SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    wait_for_inputs(OVERLAP)
    row = tl.program_id(0) * size
    at = tl.arange(0, BLOCK)
    inside = at < size
    kind: tl.constexpr = delta_ptr.dtype.element_ty
    delta = tl.load(delta_ptr + row + at, inside, 0.0)
    total = _exchange(
        delta,
        inside,
        peers_ptr,
        numbers_ptr,
        kind,
        OWN,
        RANKS,
        PROGRAMS,
        BLOCK,
        SLOTS,
        SENDS,
        RECEIVES,
    )
    if RECEIVES:
        # Rounded as if another kernel read the sum.
        total = total.to(kind).to(tl.float32)
        x = tl.load(x_ptr + row + at, inside, 0.0).to(tl.float32)
        rounded = (x + total).to(kind)
        tl.store(sum_ptr + row + at, rounded, inside)
        normed = scale_by_rms(rounded.to(tl.float32), inside, size, eps, False)
        normed *= tl.load(weight_ptr + at, inside, 0.0).to(tl.float32) + OFFSET
        tl.store(out_ptr + row + at, normed.to(kind), inside)


def rank_sum(
    x: torch.Tensor, buffers: SumBuffers, *, sends: bool = True, receives: bool = True
) -> torch.Tensor:
    """Return the sum of all ranks' x, of any shape and at most LIMIT bytes.

    A test without threads on a device lets all ranks send first, and then all receive.
    """
    assert x.nbytes <= LIMIT
    x = x.contiguous()
    out = torch.empty_like(x)
    block = buffers.block_bytes // x.itemsize
    if x.numel():
        _rank_sum_kernel[(triton.cdiv(x.numel(), block),)](
            x,
            out,
            buffers.peers,
            buffers.numbers,
            x.numel(),
            **_constants(buffers, block, sends=sends, receives=receives),
            **launch_options(x.device),
        )
    return out


def rank_sum_norm(
    x: torch.Tensor,
    delta: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    buffers: SumBuffers,
    *,
    offset: bool = False,
    sends: bool = True,
    receives: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x plus the sum of all ranks' delta, and its RMS norm; [T, N] each.

    The bits are those of `rank_sum` and then `norm`. The buffers must have blocks of a row.
    """
    rows, size = delta.shape
    assert rows <= buffers.programs
    x, delta = x.contiguous(), delta.contiguous()
    total, normed = torch.empty_like(x), torch.empty_like(x)
    block = buffers.block_bytes // delta.itemsize
    if rows:
        _rank_sum_norm_kernel[(rows,)](
            x,
            delta,
            weight,
            total,
            normed,
            buffers.peers,
            buffers.numbers,
            size,
            eps,
            OFFSET=int(offset),
            **_constants(buffers, block, sends=sends, receives=receives),
            num_warps=min(max(block // 512, 1), 16),
            **launch_options(x.device),
        )
    return total, normed


def _constants(buffers: SumBuffers, block: int, *, sends: bool, receives: bool) -> dict[str, Any]:
    return {
        "OWN": buffers.own,
        "RANKS": len(buffers.peers),
        "PROGRAMS": buffers.programs,
        "BLOCK": block,
        "SLOTS": SLOTS,
        "SENDS": sends,
        "RECEIVES": receives,
    }
