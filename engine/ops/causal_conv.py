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

    x is [T, C], weight [C, W], bias [C]. The states `tails` [slots + 1, W - 1, C], in x's dtype,
    hold the last W - 1 inputs of a sequence, oldest first.
    """
    if kernels == "triton":
        from engine.kernels.triton.causal_conv import convolve as launch

        return launch(x, weight, bias, tails, runs.starts, runs.reads, runs.writes, silu=silu)
    if kernels == "numba":
        from engine.kernels.numba.causal_conv import convolve

        return convolve(x, weight, bias, tails, runs.starts, runs.reads, runs.writes, silu=silu)
    width, count = weight.shape[1], len(x)
    begins, reads = runs.of_tokens()
    tokens = torch.arange(count, device=x.device)
    first = torch.where(begins, tokens, 0).cummax(0).values  # of each token's run
    kept = tails.index_select(0, reads.squeeze(1))  # [T, W - 1, C]
    inputs = [x]  # of each token: its own, the one before it, and so on
    for age in range(1, width):
        place = tokens - age
        own = x.index_select(0, place.clamp(min=0))
        before = (width - 1 + place - first).clamp(min=0, max=width - 2)
        old = kept.gather(1, before[:, None, None].expand(-1, 1, kept.shape[2])).squeeze(1)
        inputs.append(torch.where((place >= first)[:, None], own, old))
    results = _sum(inputs[::-1], weight, bias)
    slots = runs.writes
    news = torch.stack(inputs[: width - 1][::-1], dim=1)  # [T, W - 1, C]
    if runs.observer is not None:
        runs.observer.note_inputs(tails, news)
    tails.index_copy_(0, slots, torch.where((slots > 0)[:, None, None], news, tails[:1]))
    return (apply_silu(results) if silu else results).to(x.dtype)


def _sum(
    inputs: list[torch.Tensor], weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the weighted sums [T, C] of W `inputs` [T, C] in fp32, added in their order."""
    sums = torch.zeros_like(inputs[0], dtype=torch.float32)
    for each, taps in zip(inputs, weight.float().unbind(1), strict=True):
        sums += each.float() * taps
    return sums if bias is None else sums + bias.float()
