"""Launches of the kernel for quantised weights, on meta tensors: every form, dtype and tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from engine.kernels.triton.codes import multiply_codes
from engine.ops.codes import GROUPS, Quantization

KINDS: tuple[Quantization, ...] = ("int8", "int4", "fp8")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = (1, 17, 33, 200)  # one for each tile


def launch(kind: Quantization, dtype: torch.dtype, rows: int, inputs: int, outputs: int) -> None:
    """Launch for a layer with a bias, and for a head without one that returns fp32."""
    meta = torch.device("meta")
    x = torch.empty(rows, inputs, dtype=dtype, device=meta)
    row_bytes = inputs // 2 if kind == "int4" else inputs
    codes = torch.empty(outputs, row_bytes, dtype=torch.uint8, device=meta)
    groups = -(-inputs // GROUPS[kind])
    scale = torch.float32 if kind == "fp8" else torch.float16
    scales = torch.empty(outputs, groups, dtype=scale, device=meta)
    offsets = torch.empty_like(scales) if kind == "int4" else None
    bias = torch.empty(outputs, dtype=dtype, device=meta)
    form: Any = {"kind": kind, "group": GROUPS[kind]}
    multiply_codes(x, codes, scales, offsets, bias, dtype, **form)
    multiply_codes(x, codes, scales, offsets, None, torch.float32, **form)


def in_bf16() -> Iterator[str]:
    """Each form with the tiles of one row and of many."""
    for kind in KINDS:
        for rows in (1, 200):
            launch(kind, torch.bfloat16, rows, 4096, 6144)
            yield f"{kind}, {rows} rows"


def everything() -> Iterator[str]:
    """Each form, dtype and tile, also with inputs that fill no tile."""
    for kind in KINDS:
        for dtype in DTYPES:
            for rows in ROWS:
                for inputs in (4096, 2080):
                    launch(kind, dtype, rows, inputs, 1000)
                yield f"{kind}, {dtype}, {rows} rows"
