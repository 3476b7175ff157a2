"""Sample tokens without a sort, for greedy, sampled and filtered rows in one batch.

A draw is for R entries. Entry i has the parameters of row `row_ids[i]`, or of row i without row
ids. With `tokens`, the drawn token is appended to its row; entries of the padding row are passed
over.

There are two launches. The first finds the highest logit of each chunk of the vocabulary. For rows
without filters it also finds the chunk's best token: the most likely one, or the most likely one
after adding noise. The second combines the chunks. For a row with filters it searches for the
smallest logit that is kept (engine/kernels/triton/draw_filtered.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from engine.kernels.triton.draw_filtered import (
    LOWEST,
    draw_filtered,
    highest,
    load_logits,
    order_of,
)
from engine.kernels.triton.noise import log_noise, noise_key

CHUNK = 2048  # tokens of a program of the first launch, and that the second reads at a time


@triton.jit
def _is_filtered(temperature, top_k, top_p, min_p, greedy_below):
    is_sampled = temperature >= greedy_below
    has_filter = (top_k > 0) | (top_p < 1.0) | (min_p > 0.0)
    return is_sampled & has_filter


@triton.jit
def _row_of(entry, row_ids_ptr):
    row = entry
    if row_ids_ptr is not None:
        row = tl.load(row_ids_ptr + entry)
    return row


@triton.jit
def _position(entry, row, ahead_ptr, length_ptr):
    """Return where the entry's token goes in its row."""
    position = tl.load(length_ptr + row).to(tl.int64)
    if ahead_ptr is not None:
        position += tl.load(ahead_ptr + entry)
    return position


@triton.jit(do_not_specialize=["row_ids_ptr", "ahead_ptr"])  # slices
def _chunk_kernel(
    logits_ptr,
    row_ids_ptr,
    ahead_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    length_ptr,
    best_ptr,
    token_ptr,
    peak_ptr,
    position_ptr,
    stride,
    size,
    padding,
    greedy_below,
    CHUNK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    row = _row_of(entry, row_ids_ptr)
    size = tl.where(row == padding, 0, size)  # reads no logits
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    scores = load_logits(logits_ptr + entry * stride, tokens, size)
    broken = (scores != scores) | (scores == float("inf"))
    is_broken = tl.max(broken.to(tl.int32)) > 0
    place = entry * tl.num_programs(1) + chunk
    tl.store(peak_ptr + place, tl.where(is_broken, float("inf"), tl.max(scores)))
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if not _is_filtered(temperature, top_k, top_p, min_p, greedy_below):
        if temperature >= greedy_below:
            position = _position(entry, row, ahead_ptr, length_ptr)
            key = noise_key(tl.load(seed_ptr + row), position)
            scores = tl.div_rn(scores, temperature) - log_noise(key, tokens)
        best, index = highest(scores)
        tl.store(best_ptr + place, best)
        tl.store(token_ptr + place, chunk * CHUNK + index)
    if chunk == 0:  # the second launch changes lengths, which other entries of the row still need
        tl.store(position_ptr + entry, _position(entry, row, ahead_ptr, length_ptr))


@triton.jit(do_not_specialize=["row_ids_ptr", "ahead_ptr"])
def _pick_kernel(
    logits_ptr,
    row_ids_ptr,
    ahead_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seed_ptr,
    length_ptr,
    best_ptr,
    token_ptr,
    peak_ptr,
    position_ptr,
    known_ptr,
    out_ptr,
    stride,
    size,
    chunks,
    width,
    padding,
    greedy_below,
    invalid,
    CHUNKS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    entry = tl.program_id(0).to(tl.int64)
    row = _row_of(entry, row_ids_ptr)
    is_real = row != padding
    chunk = tl.arange(0, CHUNKS)
    is_chunk = chunk < chunks
    places = entry * chunks + chunk
    peaks = tl.load(peak_ptr + places, is_chunk, float("-inf"))
    peak = tl.max(peaks)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if (peak == float("inf")) | (peak == float("-inf")):
        token = tl.full([], invalid, tl.int32)
    elif _is_filtered(temperature, top_k, top_p, min_p, greedy_below):
        key = noise_key(tl.load(seed_ptr + row), tl.load(position_ptr + entry))
        tops = tl.where(is_chunk, order_of(peaks), LOWEST)
        filtered = (logits_ptr + entry * stride, size, temperature, peak, tops)
        token = draw_filtered(filtered, top_k, top_p, min_p, key, CHUNK).to(tl.int32)
    else:
        scores = tl.load(best_ptr + places, is_chunk, float("-inf"))
        best = tl.argmax(scores, 0, tie_break_left=True)
        token = tl.load(token_ptr + entry * chunks + best)
    tl.store(out_ptr + entry, token.to(tl.int64), is_real)
    if known_ptr is not None:
        position = tl.load(position_ptr + entry)
        tl.store(known_ptr + row * width + position, tl.maximum(token, 0), is_real)
        is_last = is_real & (tl.load(ahead_ptr + entry) == 0)
        tl.store(length_ptr + row, (position + 1).to(tl.int32), is_last)


class Appended(NamedTuple):
    """The rows that a draw of R entries reads its parameters from, and appends its tokens to."""

    row_ids: torch.Tensor  # [R] int64
    ahead: torch.Tensor  # [R] int64: drafted tokens behind the known ones of the entry's row
    tokens: torch.Tensor  # [N, L] int32, dense
    padding: int  # the row whose entries are passed over


def draw_tokens(
    logits: torch.Tensor,
    params: Sequence[torch.Tensor],
    greedy_below: float,
    invalid: int,
    appended: Appended | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return tokens [R] int64 for fp32 logits [R, V], as `engine.sampling.draw` defines them.

    Each row of logits must be contiguous; the stride between rows is free. `params` are the dense
    columns of DrawParams: [R], or with `appended` [N], where the last one is int32 and grows. `out`
    [R] int64 is then written where an entry has a row, and not where it is padding.
    """
    rows, size = logits.shape
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1
    chunk = min(CHUNK, triton.next_power_of_2(size))
    chunks = triton.cdiv(size, chunk)
    device = logits.device
    if out is None:
        out = torch.empty(rows, dtype=torch.int64, device=device)
    if rows == 0:
        return out
    row_ids, ahead, tokens, padding = appended or (None, None, None, -1)
    given = (row_ids, ahead, *params)
    found = (
        torch.empty(rows, chunks, device=device),
        torch.empty(rows, chunks, dtype=torch.int32, device=device),
        torch.empty(rows, chunks, device=device),
        torch.empty(rows, dtype=torch.int64, device=device),
    )
    stride = logits.stride(0)
    _chunk_kernel[(rows, chunks)](
        logits, *given, *found, stride, size, padding, greedy_below, CHUNK=chunk
    )
    _pick_kernel[(rows,)](
        logits,
        *given,
        *found,
        tokens,
        out,
        stride,
        size,
        chunks,
        0 if tokens is None else tokens.shape[1],
        padding,
        greedy_below,
        invalid,
        CHUNKS=triton.next_power_of_2(chunks),
        CHUNK=chunk,
        num_warps=max(chunk // 256, 1),
    )
    return out
