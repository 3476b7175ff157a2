"""Launches of the kernels of recurrent layers, on meta tensors: sizes of published models."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.ops.causal_conv import causal_conv
from engine.ops.gated import sigmoid_mul
from engine.ops.gated_delta import gated_delta
from engine.ops.norm import gated_rms_norm
from engine.ops.selective_scan import selective_scan
from engine.ops.state_runs import StateRuns

SLOTS = 9
STEPS = {1: 1, 4: 4, 100: 3}  # runs by tokens: decodes, and a step with chunks
DELTA = ((16, 16, 128), (16, 32, 128))  # heads of keys, heads of values, size: Qwen3.5, Qwen3-Next
SCAN = ((48, 1, 64, 128), (128, 1, 64, 128), (128, 8, 64, 128))  # heads, groups, size, state size
LFM2 = (2048, 3)  # channels and width


def meta(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def runs_of(tokens: int) -> StateRuns:
    counts = (STEPS[tokens] + 1, STEPS[tokens], tokens)
    return StateRuns(*(meta(count, dtype=torch.int64) for count in counts))


def vectors(count: int, heads: int, dtype: torch.dtype) -> list[torch.Tensor]:
    return [meta(heads, dtype=dtype) for _ in range(count)]


def delta(heads: int, values: int, size: int, tokens: int, dtype: torch.dtype) -> None:
    """Launch what a layer does between its linear layers."""
    widths = [heads * size, heads * size, values * size]
    runs, channels = runs_of(tokens), sum(widths)
    mixed, gate, a, b = meta(tokens, channels + values * size + 2 * values, dtype=dtype).split(
        [channels, values * size, values, values], 1
    )
    taps, tails = meta(channels, 4, dtype=dtype), meta(SLOTS, 3, channels, dtype=dtype)
    mixed = causal_conv(mixed, taps, None, tails, runs, silu=True, kernels="triton")
    q, k, v = (part.view(tokens, -1, size) for part in mixed.split(widths, 1))
    states = meta(SLOTS, values, size, size, dtype=torch.float32)
    gates = vectors(2, values, torch.float32)
    y = gated_delta(q, k, v, a, b, *gates, states, runs, kernels="triton")
    z = gate.view(tokens, values, size)
    norm = meta(size, dtype=dtype)
    gated_rms_norm(y, z, norm, 1e-6, gate_first=False, kernels="triton")
    attended, gate = meta(tokens, 16, 2, 256, dtype=dtype).unbind(2)
    sigmoid_mul(attended, gate, "triton")


def scan(heads: int, groups: int, size: int, state: int, tokens: int, dtype: torch.dtype) -> None:
    inner, widths = heads * size, [heads * size, groups * state, groups * state]
    runs, channels = runs_of(tokens), sum(widths)
    gate, mixed, dt = meta(tokens, inner + channels + heads, dtype=dtype).split(
        [inner, channels, heads], 1
    )
    taps, tails = meta(channels, 4, dtype=dtype), meta(SLOTS, 3, channels, dtype=dtype)
    [bias] = vectors(1, channels, dtype)
    mixed = causal_conv(mixed, taps, bias, tails, runs, silu=True, kernels="triton")
    x, b, c = mixed.split(widths, 1)
    b, c = (part.view(tokens, groups, state) for part in (b, c))
    states = meta(SLOTS, heads, state, size, dtype=torch.float32)
    x = x.view(tokens, heads, size)
    a_log, d, dt_bias = vectors(3, heads, dtype)
    y = selective_scan(x, b, c, dt, a_log, d, dt_bias, states, runs, kernels="triton").flatten(1)
    norm = meta(inner, dtype=dtype)
    gated_rms_norm(y, gate, norm, 1e-5, gate_first=True, kernels="triton")


def short_conv(channels: int, width: int, tokens: int, dtype: torch.dtype) -> None:
    x, taps = meta(tokens, channels, dtype=dtype), meta(channels, width, dtype=dtype)
    tails = meta(SLOTS, width - 1, channels, dtype=dtype)
    causal_conv(x, taps, None, tails, runs_of(tokens), silu=False, kernels="triton")


def everything() -> Iterator[str]:
    """Launch all sizes in bf16, and the first of each kind in the other dtypes."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        count = None if dtype == torch.bfloat16 else 1
        for tokens in STEPS:
            for sizes in DELTA[:count]:
                delta(*sizes, tokens, dtype)
                yield f"delta rule {sizes} {dtype} of {tokens}"
            for shape in SCAN[:count]:
                scan(*shape, tokens, dtype)
                yield f"scan {shape} {dtype} of {tokens}"
            short_conv(*LFM2, tokens, dtype)
            yield f"convolution {LFM2} {dtype} of {tokens}"
