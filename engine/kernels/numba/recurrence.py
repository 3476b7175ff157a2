"""The gated delta rule and the selective scan on a CPU (`source/recurrence.py`)."""

from __future__ import annotations

import torch

from engine.device.openmp import in_threads
from engine.kernels.numba.call import RecurrenceCall
from engine.kernels.numba.machine_code import kernel_store

ALONE = 2**16  # changed numbers of states that are not worth several threads


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
    a, b = _of_one_dtype(a, b)
    a_log, dt_bias = _of_one_dtype(a_log, dt_bias)
    call = RecurrenceCall(
        step=a.data_ptr(),
        step_stride=a.stride(0),
        beta=b.data_ptr(),
        beta_stride=b.stride(0),
        gate_bytes=a.itemsize,
        a_log=a_log.data_ptr(),
        dt_bias=dt_bias.data_ptr(),
        vector_bytes=a_log.itemsize,
        scale=q.shape[2] ** -0.5,
    )
    return _run(call, q, k, v, states, starts, reads, writes, corrects=True)


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
    [dt] = _of_one_dtype(dt)
    a_log, d, dt_bias = _of_one_dtype(a_log, d, dt_bias)
    call = RecurrenceCall(
        step=dt.data_ptr(),
        step_stride=dt.stride(0),
        gate_bytes=dt.itemsize,
        a_log=a_log.data_ptr(),
        dt_bias=dt_bias.data_ptr(),
        skip=d.data_ptr(),
        vector_bytes=a_log.itemsize,
        scale=1.0,
    )
    return _run(call, c, b, x, states, starts, reads, writes, corrects=False)


def _of_one_dtype(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensors as they are, if all are fp32 or all are bf16, else as fp32."""
    dtype = tensors[0].dtype
    is_read = dtype in (torch.float32, torch.bfloat16)
    if is_read and all(tensor.dtype == dtype for tensor in tensors):
        return tensors
    return tuple(tensor.float() for tensor in tensors)


def _run(
    call: RecurrenceCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    states: torch.Tensor,
    starts: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    *,
    corrects: bool,
) -> torch.Tensor:
    """Fill in what both operations have, and compute. The results are in the value's dtype."""
    assert query.dtype == key.dtype == value.dtype
    assert states.dtype == torch.float32
    assert states.is_contiguous()
    tokens, heads, columns = value.shape
    out = torch.empty(value.shape, dtype=value.dtype)
    call.tokens, call.heads, call.columns = tokens, heads, columns
    call.rows = key.shape[2]
    call.shared = heads // key.shape[1]
    call.runs = len(reads)
    call.starts = starts.data_ptr()
    call.reads = reads.data_ptr()
    call.writes = writes.data_ptr()
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        assert tensor.stride(2) == 1
        setattr(call, name, tensor.data_ptr())
        setattr(call, f"{name}_stride", tensor.stride(0))
        setattr(call, f"{name}_head", tensor.stride(1))
    call.states = states.data_ptr()
    call.out = out.data_ptr()
    half = value.dtype == torch.bfloat16
    kernel = kernel_store().address("recurrence.recurrence_kernel", corrects, half)
    in_threads(kernel, call, alone=tokens * states[0].numel() < ALONE)
    return out
