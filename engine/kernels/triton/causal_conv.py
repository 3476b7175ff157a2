"""Depthwise causal convolution on a GPU.

A program computes a tile of channels for one run, a few tokens at a time. Each token's sum has the
same terms in the same order wherever it is. The programs behind the last run write zeros for
padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.kernels.triton.gated import sigmoid
from engine.kernels.triton.padding import write_padding

TOKENS, CHANNELS = 8, 128  # of a tile
WIDTHS = (2, 3, 4)  # inputs in a sum


@triton.jit
def _inputs(
    x_ptr,
    tail_ptr,
    token,
    first,
    end,
    stride,
    channels,
    mask,
    BACK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Load the inputs BACK tokens before each `token` [TOKENS, 1], from the tail before `first`."""
    place = token - BACK
    new = tl.load(x_ptr + place * stride, mask & (place >= first) & (token < end), 0.0)
    age = place - first + WIDTH - 1
    old = tl.load(tail_ptr + age * channels, mask & (place < first), 0.0)
    return tl.where(place < first, old, new)


@triton.jit
def _weights(weight_ptr, mask, BACK: tl.constexpr, WIDTH: tl.constexpr):
    return tl.load(weight_ptr + (WIDTH - 1 - BACK), mask, 0.0).to(tl.float32)


# Inputs may be slices.
@triton.jit(do_not_specialize=["x_ptr", "stride", "tokens"])
def _conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    tails_ptr,
    starts_ptr,
    reads_ptr,
    writes_ptr,
    out_ptr,
    stride,
    channels,
    tokens,
    WIDTH: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    run = tl.program_id(1)
    channel = (tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS))[None, :]
    mask = channel < channels
    first = tl.load(starts_ptr + run)
    x_ptr += channel
    out_ptr += channel
    if run == tl.num_programs(1) - 1:
        write_padding(out_ptr, first, tokens, channels, mask)
    else:
        end = tl.load(starts_ptr + run + 1)
        slot_size = channels.to(tl.int64) * (WIDTH - 1)
        slots = tails_ptr + channel
        tail = slots + tl.load(reads_ptr + run) * slot_size
        taps = weight_ptr + channel * WIDTH
        for begin in range(first, end, TOKENS):
            token = begin + tl.arange(0, TOKENS)[:, None]
            inside = mask & (token < end)
            last = _inputs(x_ptr, tail, token, first, end, stride, channels, mask, 0, WIDTH)
            second = _inputs(x_ptr, tail, token, first, end, stride, channels, mask, 1, WIDTH)
            third = last
            fourth = last
            sums = tl.zeros([TOKENS, CHANNELS], tl.float32)
            if WIDTH > 3:
                fourth = _inputs(x_ptr, tail, token, first, end, stride, channels, mask, 3, WIDTH)
                sums += _weights(taps, mask, 3, WIDTH) * fourth.to(tl.float32)
            if WIDTH > 2:
                third = _inputs(x_ptr, tail, token, first, end, stride, channels, mask, 2, WIDTH)
                sums += _weights(taps, mask, 2, WIDTH) * third.to(tl.float32)
            sums += _weights(taps, mask, 1, WIDTH) * second.to(tl.float32)
            sums += _weights(taps, mask, 0, WIDTH) * last.to(tl.float32)
            if bias_ptr is not None:
                sums += tl.load(bias_ptr + channel, mask, 0.0).to(tl.float32)
            if SILU:
                sums *= sigmoid(sums)
            tl.store(out_ptr + token * channels, sums.to(out_ptr.dtype.element_ty), inside)
            slot = tl.load(writes_ptr + token, token < end, 0)
            tl.debug_barrier()  # no thread writes a slot before all have read it
            newest = slots + slot * slot_size + (WIDTH - 2) * channels
            tl.store(newest, last, inside & (slot > 0))
            if WIDTH > 2:
                tl.store(newest - channels, second, inside & (slot > 0))
            if WIDTH > 3:
                tl.store(newest - 2 * channels, third, inside & (slot > 0))


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
    """Compute what ops.causal_conv.causal_conv does, for sums of 2 to 4 inputs."""
    tokens, channels = x.shape
    width = weight.shape[1]
    assert width in WIDTHS
    assert x.stride(1) == 1
    assert weight.is_contiguous()
    assert tails.is_contiguous()
    out = torch.empty(tokens, channels, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(channels, CHANNELS), len(reads) + 1)
    _conv_kernel[grid](
        x,
        weight,
        bias,
        tails,
        starts,
        reads,
        writes,
        out,
        x.stride(0),
        channels,
        tokens,
        WIDTH=width,
        SILU=silu,
        TOKENS=TOKENS,
        CHANNELS=CHANNELS,
    )
    return out
