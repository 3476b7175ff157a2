"""Launches of the experts' kernel, on meta tensors: every tile and dtype."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from engine.kernels.triton.experts import multiply_experts

LAYERS = ((32, 2880, 5760), (8, 4096, 14336))  # experts, inputs, outputs: gpt-oss and Mixtral
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = (4, 1024)  # few and many of an expert


def everything() -> Iterator[str]:
    """Each tile with and without a bias; the inputs of gpt-oss fill no tile."""
    meta = torch.device("meta")
    for dtype in DTYPES:
        for experts, inputs, outputs in LAYERS:
            weight = torch.empty(experts, outputs, inputs, dtype=dtype, device=meta)
            bias = torch.empty(experts, outputs, dtype=dtype, device=meta)
            starts = torch.empty(experts + 1, dtype=torch.int64, device=meta)
            for rows in ROWS:
                x = torch.empty(rows, inputs, dtype=dtype, device=meta)
                multiply_experts(x, weight, bias, starts)
                multiply_experts(x, weight, None, starts)
        yield str(dtype)
