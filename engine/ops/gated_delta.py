"""The gated delta rule: a linear attention that replaces what its state holds for a key."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.ops.kernels import Kernels
from engine.ops.recurrence import Stepped, recur
from engine.ops.state_runs import StateRuns

L2_EPS = 1e-6  # of the norms of queries and keys; no config has it


def gated_delta(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    states: torch.Tensor,
    runs: StateRuns,
    *,
    kernels: Kernels,
) -> torch.Tensor:
    """Return S^T q [T, Hv, V] in v's dtype, and write the `states` of `runs` (arXiv 2412.06464).

    At each token S becomes S' + k beta (v - S'^T k)^T. S' is exp(g) S with
    g = -exp(a_log) softplus(a + dt_bias), and beta is sigmoid(b). Before, q and k are divided by
    their length, and q by sqrt(K).

    q and k are [T, Hk, K], v is [T, Hv, V], a and b are [T, Hv], a_log and dt_bias are [Hv]. Only
    their last dimension must be contiguous. The states are [slots + 1, Hv, K, V] fp32. Value head h
    uses key head h // (Hv // Hk). It is computed in fp32.
    """
    if kernels == "triton":
        from engine.kernels.triton.recurrence import delta_rule as launch

        return launch(q, k, v, a, b, a_log, dt_bias, states, runs.starts, runs.reads, runs.writes)
    if kernels == "numba":
        from engine.kernels.numba.recurrence import delta_rule

        return delta_rule(
            q, k, v, a, b, a_log, dt_bias, states, runs.starts, runs.reads, runs.writes
        )
    group = v.shape[1] // k.shape[1]
    rate = -a_log.float().exp()
    scale = q.shape[2] ** -0.5

    def step(state: torch.Tensor, token: int) -> Stepped:
        query = (_unit(q[token]) * scale).repeat_interleave(group, dim=0)
        key = _unit(k[token]).repeat_interleave(group, dim=0)
        decay = (rate * F.softplus(a[token].float() + dt_bias.float())).exp()
        beta = b[token].float().sigmoid()
        state = state * decay[:, None, None]
        change = beta[:, None] * (v[token].float() - _read(state, key))
        state = state + key[:, :, None] * change[:, None, :]
        return Stepped(state, _read(state, query), beta, decay)

    results = v.new_zeros(v.shape)
    recur(step, states, runs, results)
    return results


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Return the rows of x [H, K], divided by their length, in fp32."""
    x = x.float()
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


def _read(state: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Return S^T k [H, V] for states [H, K, V] and keys [H, K]."""
    return (state * key[:, :, None]).sum(1)
