"""Operations on rows with gates on a CPU (`source/gated.py`)."""

from __future__ import annotations

import torch

from engine.device.openmp import in_threads
from engine.kernels.numba.call import GATE_THEN_NORM, NORM_THEN_GATE, SIGMOID_MUL, GatedCall
from engine.kernels.numba.machine_code import kernel_store

PART = 2**12  # elements that are worth a thread


def sigmoid_mul(x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Return x * sigmoid(gate), [T, N] or [T, H, N] each."""
    return _run(SIGMOID_MUL, x, gate, None, 0.0)


def gated_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, *, gate_first: bool
) -> torch.Tensor:
    """Compute what ops.norm.gated_rms_norm does, for [T, N] or [T, H, N]."""
    operation = GATE_THEN_NORM if gate_first else NORM_THEN_GATE
    return _run(operation, x, gate, weight, eps)


def _run(
    operation: int, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """Compute with any strides of tokens and heads."""
    assert gate.shape == x.shape
    assert gate.dtype == x.dtype
    assert x.stride(-1) == gate.stride(-1) == 1
    out = torch.empty(x.shape, dtype=x.dtype)
    if x.dim() == 2:
        x, gate = x[:, None], gate[:, None]
    tokens, heads, size = x.shape
    call = GatedCall(
        rows=tokens * heads,
        at_once=max(1, PART // size),
        heads=heads,
        size=size,
        x=x.data_ptr(),
        x_stride=x.stride(0),
        x_head=x.stride(1),
        gate=gate.data_ptr(),
        gate_stride=gate.stride(0),
        gate_head=gate.stride(1),
        out=out.data_ptr(),
        eps=eps,
    )
    if weight is not None:
        assert weight.dtype == x.dtype
        assert weight.is_contiguous()
        call.weight = weight.data_ptr()
        call.weight_head = size if weight.dim() == 2 else 0
    kernel = kernel_store().address("gated.gated_kernel", operation, x.dtype == torch.bfloat16)
    in_threads(kernel, call, alone=x.numel() < 2 * PART)
    return out
