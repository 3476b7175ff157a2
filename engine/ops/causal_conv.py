"""Depthwise causal convolution over the tokens of each sequence."""

from __future__ import annotations

import torch

from engine.ops.gated import silu as apply_silu
from engine.ops.kernels import Kernels
from engine.ops.state_runs import StateRuns


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tails: torch.Tensor,
    runs: StateRuns,
    *,
    silu: bool,
    kernels: Kernels,
) -> torch.Tensor:
    """Return the weighted sums of the last W inputs of each token's sequence [T, C], in x's dtype.

    A token's own input is the last of the W, with weight[:, -1]. `silu` is applied to the sums.
    They are computed in fp32.

    x is [T, C], weight [C, W], bias [C]. The states `tails` [slots + 1, C, W - 1], in x's dtype,
    hold the last W - 1 inputs of a sequence, oldest first.
    """
    if kernels == "triton":
        from engine.kernels.triton.causal_conv import convolve as launch

        return launch(x, weight, bias, tails, runs.starts, runs.reads, runs.writes, silu=silu)
    if kernels == "numba":
        from engine.kernels.numba.causal_conv import convolve

        return convolve(x, weight, bias, tails, runs.starts, runs.reads, runs.writes, silu=silu)
    starts, reads, writes = runs.starts.tolist(), runs.reads.tolist(), runs.writes.tolist()
    width = weight.shape[1]
    results = x.new_zeros(x.shape)
    for run, read in enumerate(reads):
        start, end = starts[run], starts[run + 1]
        inputs = torch.cat([tails[read].t(), x[start:end]])
        sums = _sums(inputs, weight, bias)
        results[start:end] = apply_silu(sums) if silu else sums
        for token in range(start, end):
            if writes[token]:
                oldest = token - start + 1
                tails[writes[token]] = inputs[oldest : oldest + width - 1].t()
    return results


def _sums(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return the sums [n, C] in fp32 for n + W - 1 `inputs`. Each adds its terms in one order."""
    count = len(inputs) - weight.shape[1] + 1
    sums = inputs.new_zeros(count, inputs.shape[1], dtype=torch.float32)
    for age, taps in enumerate(weight.float().unbind(1)):
        sums += inputs[age : age + count].float() * taps
    return sums if bias is None else sums + bias.float()
