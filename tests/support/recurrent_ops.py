"""The operations of recurrent layers as one kind: inputs, the call, and the result in fp64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.ops.causal_conv import causal_conv
from engine.ops.gated_delta import gated_delta
from engine.ops.kernels import Kernels
from engine.ops.selective_scan import selective_scan
from engine.ops.state_runs import StateRuns

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Operation:
    """An operation of one size. The first `ragged` of its inputs have a row for each token."""

    ragged: int
    inputs: Callable[[int, torch.dtype], Tensors]  # for a number of tokens
    state: tuple[int, ...]
    state_dtype: torch.dtype | None  # None: the dtype of the inputs
    call: Callable[[Tensors, torch.Tensor, StateRuns, Kernels], torch.Tensor]
    exact: Callable[[Tensors], torch.Tensor]  # of one sequence

    def states(self, slots: int, dtype: torch.dtype) -> torch.Tensor:
        """Return states [slots + 1, ...]. Reading a slot that is not written shows as NaN."""
        states = torch.full((slots + 1, *self.state), torch.nan, dtype=self.state_dtype or dtype)
        states[0] = 0
        return states

    def run(
        self,
        inputs: Tensors,
        pieces: Sequence[Piece],
        states: torch.Tensor,
        kernels: Kernels,
        *,
        padding: int = 0,
    ) -> list[torch.Tensor]:
        """Compute `pieces` of the tokens of `inputs` as the runs of one step."""
        places = [place for piece in pieces for place in range(piece.start, piece.end)]
        order = torch.tensor(places + [0] * padding, dtype=torch.int64)
        ragged = tuple(tensor[order] for tensor in inputs[: self.ragged])
        found = self.call(
            (*ragged, *inputs[self.ragged :]), states, runs_of(pieces, padding), kernels
        )
        assert found.isfinite().all()
        return list(found.split([piece.end - piece.start for piece in pieces] + [padding]))


@dataclass(frozen=True)
class Piece:
    """Tokens of a sequence that are computed as one run."""

    start: int
    end: int
    read: int = 0
    write: int = 0  # the slot for the state behind the last token
    drafts: tuple[int, ...] = ()  # the slots for the states behind each token, instead


def runs_of(pieces: Sequence[Piece], padding: int) -> StateRuns:
    starts, writes = [0], []
    for piece in pieces:
        size = piece.end - piece.start
        starts.append(starts[-1] + size)
        ends = [0] * (size - 1) + [piece.write] if size else []
        writes += list(piece.drafts) or ends
    reads = [piece.read for piece in pieces]
    return StateRuns(*map(torch.tensor, (starts, reads, writes + [0] * padding)))


def draw(*shape: int, seed: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def delta(heads: int, groups: int, k: int, v: int) -> Operation:
    """Return the gated delta rule. Decays go to exp(-100) at every second token."""

    def inputs(count: int, dtype: torch.dtype) -> Tensors:
        fused = draw(count, 2 * heads * k + groups * heads * v + 1, seed=0).to(dtype)
        sizes = (heads * k, heads * k, groups * heads * v, 1)  # the last makes rows not contiguous
        shapes = ((heads, k), (heads, k), (groups * heads, v))
        parts = [
            part.unflatten(1, size)
            for part, size in zip(fused.split(sizes, 1), shapes, strict=False)
        ]
        gates = draw(2, count, groups * heads, seed=1)
        gates[0, 1::2] += 50
        a_log = draw(groups * heads, seed=2, scale=0.3) + 0.6
        return (*parts, *gates.to(dtype), a_log, draw(groups * heads, seed=3))

    def exact(tensors: Tensors) -> torch.Tensor:
        q, k, v, a, b, a_log, dt_bias = (tensor.double() for tensor in tensors)
        q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
        q, k = (x.repeat_interleave(groups, 1) for x in (q / q.shape[-1] ** 0.5, k))
        decay = (-a_log.exp() * F.softplus(a + dt_bias, threshold=50)).exp()
        state, found = v.new_zeros(v.shape[1], k.shape[2], v.shape[2]), []
        for token in range(len(q)):
            state = state * decay[token, :, None, None]
            held = torch.einsum("hkv,hk->hv", state, k[token])
            change = b[token].sigmoid()[:, None] * (v[token] - held)
            state = state + torch.einsum("hk,hv->hkv", k[token], change)
            found.append(torch.einsum("hkv,hk->hv", state, q[token]))
        return torch.stack(found)

    return Operation(
        ragged=5,
        inputs=inputs,
        state=(groups * heads, k, v),
        state_dtype=torch.float32,
        call=lambda each, states, runs, kernels: gated_delta(*each, states, runs, kernels=kernels),
        exact=exact,
    )


def scan(heads: int, groups: int, p: int, n: int) -> Operation:
    """Return Mamba-2's recurrence. Decays go to exp(-100) at every second token."""

    def inputs(count: int, dtype: torch.dtype) -> Tensors:
        fused = draw(count, heads * p + 2 * groups * n + 1, seed=0).to(dtype)
        sizes = (heads * p, groups * n, groups * n, 1)
        shapes = ((heads, p), (groups, n), (groups, n))
        parts = [
            part.unflatten(1, size)
            for part, size in zip(fused.split(sizes, 1), shapes, strict=False)
        ]
        dt = draw(count, heads, seed=1)
        dt[1::2] += 50
        vectors = draw(3, heads, seed=2, scale=0.3)
        vectors[0] += 0.6
        return (*parts, dt.to(dtype), *vectors)

    def exact(tensors: Tensors) -> torch.Tensor:
        x, b, c, dt, a_log, d, dt_bias = (tensor.double() for tensor in tensors)
        b, c = (tensor.repeat_interleave(heads // groups, 1) for tensor in (b, c))
        time = F.softplus(dt + dt_bias, threshold=50)
        decay = (-a_log.exp() * time).exp()
        state, found = x.new_zeros(heads, n, p), []
        for token in range(len(x)):
            new = torch.einsum("hn,hp->hnp", b[token], time[token, :, None] * x[token])
            state = state * decay[token, :, None, None] + new
            found.append(torch.einsum("hnp,hn->hp", state, c[token]) + d[:, None] * x[token])
        return torch.stack(found)

    return Operation(
        ragged=4,
        inputs=inputs,
        state=(heads, n, p),
        state_dtype=torch.float32,
        call=lambda each, states, runs, kernels: selective_scan(
            *each, states, runs, kernels=kernels
        ),
        exact=exact,
    )


def conv(channels: int, width: int, *, bias: bool, silu: bool) -> Operation:
    """Return the causal convolution."""

    def inputs(count: int, dtype: torch.dtype) -> Tensors:
        x = draw(count, channels + 1, seed=0).to(dtype)[:, :channels]
        weight = draw(channels, width, seed=1).to(dtype)
        return (x, weight, draw(channels, seed=2).to(dtype)) if bias else (x, weight)

    def exact(tensors: Tensors) -> torch.Tensor:
        x, weight, *biases = (tensor.double() for tensor in tensors)
        padded = F.pad(x.t(), (width - 1, 0))
        sums = F.conv1d(padded[None], weight[:, None], *biases, groups=channels)[0].t()
        return F.silu(sums) if silu else sums

    def call(
        each: Tensors, states: torch.Tensor, runs: StateRuns, kernels: Kernels
    ) -> torch.Tensor:
        x, weight, *biases = each
        [vector] = biases or [None]
        return causal_conv(x, weight, vector, states, runs, silu=silu, kernels=kernels)

    return Operation(
        ragged=1,
        inputs=inputs,
        state=(width - 1, channels),
        state_dtype=None,
        call=call,
        exact=exact,
    )


# Sizes that tiles of kernels divide, and sizes that need several tiles and leave a rest.
OPERATIONS = {
    "delta": delta(2, 1, 16, 16),
    "delta_grouped": delta(2, 3, 20, 52),
    "scan": scan(2, 2, 16, 16),
    "scan_grouped": scan(6, 2, 52, 20),
    "conv": conv(600, 4, bias=False, silu=True),
    "conv_bias": conv(64, 3, bias=True, silu=True),
    "conv_plain": conv(16, 2, bias=True, silu=False),
}
