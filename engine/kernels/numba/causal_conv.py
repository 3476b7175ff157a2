"""Depthwise causal convolution on a CPU (`source/causal_conv.py`)."""

from __future__ import annotations

import torch

from engine.device.openmp import in_threads
from engine.kernels.numba.call import ConvCall
from engine.kernels.numba.machine_code import kernel_store

ALONE = 2**14  # inputs that are not worth several threads


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    starts: torch.Tensor,
    reads: torch.Tensor,
    writes: torch.Tensor,
    *,
    silu: bool,
) -> torch.Tensor:
    """Compute what ops.causal_conv.causal_conv does. All tensors are fp32, or all are bf16."""
    assert x.dtype == weight.dtype == tails.dtype
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert tails.is_contiguous()
    if bias is None:
        bias_address = 0
    else:
        assert bias.dtype == x.dtype
        bias_address = bias.data_ptr()
    tokens, channels = x.shape
    out = torch.empty(tokens, channels, dtype=x.dtype)
    call = ConvCall(
        tokens=tokens,
        runs=len(reads),
        starts=starts.data_ptr(),
        reads=reads.data_ptr(),
        writes=writes.data_ptr(),
        channels=channels,
        width=weight.shape[1],
        x=x.data_ptr(),
        x_stride=x.stride(0),
        weight=weight.data_ptr(),
        bias=bias_address,
        silu=silu,
        tails=tails.data_ptr(),
        out=out.data_ptr(),
    )
    half = x.dtype == torch.bfloat16
    kernel = kernel_store().address("causal_conv.conv_kernel", half)
    in_threads(kernel, call, alone=x.numel() < ALONE)
    return out
