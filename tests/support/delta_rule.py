"""The gated delta rule in float64, one token after the other, and models without parts of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

SMALLEST = 1e-6  # of the squares of a query or a key, which are divided by their length


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    *,
    normalises: bool = True,
    decays: bool = True,
    weighs_writes: bool = True,
) -> torch.Tensor:
    """Return [T, Hv, V] in float64 for one sequence; the arguments are those of `gated_delta`."""
    shared = v.shape[1] // k.shape[1]
    q, k = (each.double().repeat_interleave(shared, dim=1) for each in (q, k))
    if normalises:
        q, k = (each / (each.square().sum(-1, keepdim=True) + SMALLEST).sqrt() for each in (q, k))
    q = q / q.shape[-1] ** 0.5
    rates = a_log.double().exp() * F.softplus(a.double() + dt_bias.double())
    kept = torch.exp(-rates) if decays else torch.ones_like(rates)
    strengths = torch.sigmoid(b.double()) if weighs_writes else torch.ones_like(rates)
    state = torch.zeros(v.shape[1], q.shape[-1], v.shape[-1], dtype=torch.float64)
    read = []
    for token in range(len(q)):
        state = state * kept[token, :, None, None]
        known = torch.einsum("hkv,hk->hv", state, k[token])
        change = strengths[token, :, None] * (v[token].double() - known)
        state = state + torch.einsum("hk,hv->hkv", k[token], change)
        read.append(torch.einsum("hkv,hk->hv", state, q[token]))
    return torch.stack(read)


def without(part: str) -> Callable[..., torch.Tensor]:
    """Return a stand-in for `gated_delta` that lacks a part of the rule, for one whole text."""

    def stand_in(*given: Any, **options: Any) -> torch.Tensor:
        *inputs, _, _ = given
        return delta_rule(*inputs, **{part: False}).to(given[2].dtype)

    return stand_in
