"""Experts' products for a captured step, so that a tape can capture them on a CPU.

On a GPU, a kernel reads on the device which rows an expert has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.ops.experts import ExpertRows, Multiply


def captured_experts(
    x: torch.Tensor, experts: Sequence[Multiply], rows: ExpertRows
) -> torch.Tensor:
    """Compute all rows with every expert, and keep those that are its own.

    This replaces `expert_by_expert`.
    """
    owners = torch.searchsorted(rows.starts[1:], torch.arange(len(x)), right=True)
    found = experts[0](x)
    for expert, multiply in enumerate(experts[1:], start=1):
        found = torch.where((owners == expert)[:, None], multiply(x), found)
    return found
