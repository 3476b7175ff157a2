"""Recurrent layers on a GPU: the gated delta rule, and Mamba-2's selective scan.

In both a state [rows, columns] of a head changes at each token by keep * state + key change^T. The
columns are independent of each other. So a program computes a tile of columns of one head, for one
run, token after token, with the state in registers. A token therefore has the same bits in a chunk
and as a decode. The programs behind the last run write zeros for padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.gated import sigmoid
from engine.kernels.triton.padding import write_padding

COLUMNS = 8  # of a tile. 128 rows of it take 32 registers in each thread of a warp
L2_EPS = tl.constexpr(1e-6)


@triton.jit
def _softplus(x):
    """Return log(1 + e**x), within a few units in the last place.

    For e from 0 to 1, log(1 + e) is 2 artanh(s) with s = e / (2 + e), at most 1/3. The terms after
    the eighth are below a unit in the last place.
    """
    e = tl.exp(-tl.abs(x))
    s = e / (2.0 + e)
    square = s * s
    y = 2.0 / 15.0
    y = y * square + 2.0 / 13.0
    y = y * square + 2.0 / 11.0
    y = y * square + 2.0 / 9.0
    y = y * square + 2.0 / 7.0
    y = y * square + 2.0 / 5.0
    y = y * square + 2.0 / 3.0
    y = y * square + 2.0
    return tl.maximum(x, 0.0) + y * s


@triton.jit
def _load_row(ptr, at, rows, NORMALIZES: tl.constexpr):
    """Load a key or a query as fp32, with the length 1 if NORMALIZES."""
    x = tl.load(ptr + at, at < rows, 0.0).to(tl.float32)
    if NORMALIZES:
        x = x / tl.sqrt(tl.sum(x * x) + L2_EPS)
    return x


@triton.jit
def _gates(step_ptr, beta_ptr, rate, bias, CORRECTS: tl.constexpr):
    """Return a token's factors of the state and of the change."""
    time = _softplus(tl.load(step_ptr).to(tl.float32) + bias)
    share = time
    if CORRECTS:
        share = sigmoid(tl.load(beta_ptr).to(tl.float32))
    return tl.exp(-rate * time), share


@triton.jit
def _change(state, key, value, keep, share, CORRECTS: tl.constexpr):
    """Return the state [ROWS, COLUMNS] behind a token."""
    state *= keep
    if CORRECTS:
        value -= tl.sum(state * key[:, None], 0)
    return state + key[:, None] * (share * value)[None, :]


@triton.jit
def _head_factors(a_log_ptr, dt_bias_ptr, skip_ptr, head, CORRECTS: tl.constexpr):
    """Return a head's rate of decay, the bias of its time steps, and the share of the value."""
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    bias = tl.load(dt_bias_ptr + head).to(tl.float32)
    skip = 0.0 if CORRECTS else tl.load(skip_ptr + head).to(tl.float32)
    return rate, bias, skip


@triton.jit
def _read_state(states, slot_size, slot_ptr, mask):
    state = tl.load(states + tl.load(slot_ptr) * slot_size, mask, 0.0)
    tl.debug_barrier()  # no thread writes a slot before all have read it
    return state


@triton.jit
def _write_result(out_ptr, state, query, value, skip, mask):
    result = tl.sum(state * query[:, None], 0) + skip * value
    tl.store(out_ptr, result.to(out_ptr.dtype.element_ty), mask)


@triton.jit
def _write_state(states, slot_size, slot_ptr, state, mask):
    slot = tl.load(slot_ptr)
    tl.store(states + slot * slot_size, state, mask & (slot > 0))


# Inputs may be slices, and the layout of sums must not depend on how these are aligned.
@triton.jit(
    do_not_specialize=[
        *("query_ptr", "key_ptr", "value_ptr", "step_ptr", "beta_ptr"),
        *("query_stride", "key_stride", "value_stride", "step_stride", "beta_stride"),
        *("query_head", "key_head", "value_head", "tokens"),
    ]
)
def _recurrence_kernel(
    query_ptr,
    key_ptr,
    value_ptr,
    step_ptr,
    beta_ptr,
    a_log_ptr,
    dt_bias_ptr,
    skip_ptr,
    states_ptr,
    starts_ptr,
    reads_ptr,
    writes_ptr,
    out_ptr,
    query_stride,
    query_head,
    key_stride,
    key_head,
    value_stride,
    value_head,
    step_stride,
    beta_stride,
    heads,
    shared,
    rows,
    columns,
    tokens,
    scale,
    CORRECTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    head = tl.program_id(0)
    run = tl.program_id(2)
    row = tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(starts_ptr + run)
    out_ptr += head * columns + column
    if run == tl.num_programs(2) - 1:
        write_padding(out_ptr, first, tokens, heads * columns, column < columns)
    else:
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        slot_size = rows.to(tl.int64) * columns * heads
        states = states_ptr + (head * rows + row[:, None]) * columns + column[None, :]
        state = _read_state(states, slot_size, reads_ptr + run, mask)
        rate, bias, skip = _head_factors(a_log_ptr, dt_bias_ptr, skip_ptr, head, CORRECTS)
        keys = key_ptr + head // shared * key_head
        queries = query_ptr + head // shared * query_head
        values = value_ptr + head * value_head + column
        for token in range(first, tl.load(starts_ptr + run + 1)):
            key = _load_row(keys + token * key_stride, row, rows, CORRECTS)
            query = _load_row(queries + token * query_stride, row, rows, CORRECTS) * scale
            value = tl.load(values + token * value_stride, column < columns, 0.0).to(tl.float32)
            step = step_ptr + token * step_stride + head
            beta = beta_ptr + token * beta_stride + head
            keep, share = _gates(step, beta, rate, bias, CORRECTS)
            state = _change(state, key, value, keep, share, CORRECTS)
            out = out_ptr + token * heads * columns
            _write_result(out, state, query, value, skip, column < columns)
            _write_state(states, slot_size, writes_ptr + token, state, mask)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
) -> torch.Tensor:
    """Compute what ops.gated_delta.gated_delta does."""
    parts = (q, k, v, a, b, a_log, dt_bias, None, states, starts, reads, writes)
    return _launch(*parts, scale=q.shape[2] ** -0.5)


def scan(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
) -> torch.Tensor:
    """Compute what ops.selective_scan.selective_scan does."""
    parts = (c, b, x, dt, None, a_log, dt_bias, d, states, starts, reads, writes)
    return _launch(*parts, scale=1.0)


def _launch(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    step: torch.Tensor,
    beta: torch.Tensor | None,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor | None,
    states: torch.Tensor,
    starts: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    *,
    scale: float,
) -> torch.Tensor:
    """Launch for the delta rule if `beta` is given, else for the scan."""
    assert query.stride(2) == key.stride(2) == value.stride(2) == step.stride(1) == 1
    assert states.is_contiguous()
    tokens, heads, columns = value.shape
    rows = key.shape[2]
    out = torch.empty(value.shape, dtype=value.dtype, device=value.device)
    grid = (heads, triton.cdiv(columns, COLUMNS), len(reads) + 1)
    _recurrence_kernel[grid](
        query,
        key,
        value,
        step,
        step if beta is None else beta,  # the scan does not read it
        a_log,
        dt_bias,
        skip,
        states,
        starts,
        reads,
        writes,
        out,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        step.stride(0),
        0 if beta is None else beta.stride(0),
        heads,
        heads // key.shape[1],
        rows,
        columns,
        tokens,
        scale,
        CORRECTS=beta is not None,
        ROWS=triton.next_power_of_2(rows),
        COLUMNS=COLUMNS,
        num_warps=1,
    )
    return out
