"""The selective scan of Mamba-2: a linear recurrence with one decay for each head and token."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.ops.kernels import Kernels
from engine.ops.recurrence import Stepped, recur
from engine.ops.state_runs import StateRuns


def selective_scan(
    x: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    dt: torch.Tensor,
    a_log: torch.Tensor,
    d: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    runs: StateRuns,
    *,
    kernels: Kernels,
) -> torch.Tensor:
    """Return S^T c + d x [T, H, P] in x's dtype, and write the `states` of `runs`.

    At each token S becomes exp(-exp(a_log) dt') S + b (dt' x)^T, with dt' = softplus(dt + dt_bias)
    (Mamba-2, arXiv 2405.21060).

    x is [T, H, P], b and c are [T, G, N], dt is [T, H], a_log, d and dt_bias are [H]. Only their
    last dimension must be contiguous. The states are [slots + 1, H, N, P] fp32. Head h uses group
    h // (H // G) of b and c. It is computed in fp32.
    """
    if kernels == "triton":
        from engine.kernels.triton.recurrence import scan as launch

        return launch(x, b, c, dt, a_log, d, dt_bias, states, runs.starts, runs.reads, runs.writes)
    if kernels == "numba":
        from engine.kernels.numba.recurrence import scan

        return scan(x, b, c, dt, a_log, d, dt_bias, states, runs.starts, runs.reads, runs.writes)
    heads = x.shape[1] // b.shape[1]
    rate = -a_log.float().exp()

    def step(state: torch.Tensor, token: int) -> Stepped:
        into = b[token].float().repeat_interleave(heads, dim=0)[:, :, None]
        out = c[token].float().repeat_interleave(heads, dim=0)[:, :, None]
        inputs = x[token].float()
        time = F.softplus(dt[token].float() + dt_bias.float())
        decay = (rate * time).exp()
        state = state * decay[:, None, None] + into * (time[:, None] * inputs)[:, None, :]
        result = (state * out).sum(1) + d.float()[:, None] * inputs
        return Stepped(state, result, time, decay)

    results = x.new_zeros(x.shape)
    recur(step, states, runs, results)
    return results
