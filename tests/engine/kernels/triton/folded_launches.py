"""Launches of folded linear layers, on meta tensors: decoder layers of published sizes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from engine.kernels.triton import chips
from engine.kernels.triton.chips import Features
from engine.kernels.triton.folded_linear import TILES, Norm, Residual, folded_linear
from engine.kernels.triton.gated import activate
from engine.kernels.triton.linear import few_rows_linear
from engine.kernels.triton.norm import norm

EVERYTHING = Features(
    overlap=True, trigger_first=True, folded=True, early_weights=True, split_inputs=True
)


class Sizes(NamedTuple):
    """The widths of a decoder layer."""

    hidden: int
    qkv: int
    attended: int
    intermediate: int


SIZES = {
    "qwen3-0.6b": Sizes(1024, 4096, 2048, 3072),
    "llama-3.2-1b": Sizes(2048, 3072, 2048, 8192),
    "qwen3-8b": Sizes(4096, 6144, 4096, 12288),
    "llama-3.1-8b": Sizes(4096, 6144, 4096, 14336),
    "llama-3.1-70b": Sizes(8192, 10240, 8192, 28672),
}
ROWS = (1, 16, 32, 64)  # one for each tile


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def layer(sizes: Sizes, rows: int, dtype: torch.dtype = torch.bfloat16) -> None:
    """Launch the linear layers of one decoder layer, and a head."""
    hidden = sizes.hidden
    x = meta(rows, hidden, dtype=dtype)
    residual = Residual(x, meta(hidden, dtype=torch.int32))
    outputs = meta(hidden, sizes.attended, dtype=dtype)
    attended = meta(rows, sizes.attended, dtype=dtype)
    squares = folded_linear(attended, outputs, None, dtype, residual=residual).squares
    assert squares is not None
    norm = Norm(meta(hidden, dtype=dtype), 1e-6, False, squares)
    folded_linear(x, meta(sizes.qkv, hidden, dtype=dtype), None, dtype, norm=norm)
    up = meta(2 * sizes.intermediate, hidden, dtype=dtype)
    gated = folded_linear(x, up, None, dtype, norm=norm, kind="silu").out
    down = meta(hidden, sizes.intermediate, dtype=dtype)
    folded_linear(gated, down, None, dtype, residual=residual)
    folded_linear(x, meta(4096, hidden, dtype=dtype), None, torch.float32)


def of_sizes(*names: str, counts: Sequence[int] = ROWS) -> Iterator[str]:
    chips.force(EVERYTHING)
    for name in names:
        for rows in counts:
            layer(SIZES[name], rows)
            yield f"{name} of {rows}"


def benchmarked() -> Iterator[str]:
    return of_sizes("qwen3-0.6b", counts=(1, 64))


def of_few_rows() -> Iterator[str]:
    """Today's kernel of up to 16 rows, as H200s launch it."""
    chips.force(None)
    few_rows_linear(meta(1, 1024), meta(4096, 1024), None, torch.bfloat16)
    yield "few rows"


def small_kernels() -> Iterator[str]:
    """Kernels that read nothing before they wait, with the trigger first."""
    chips.force(EVERYTHING)
    x = meta(4, 1024)
    norm(x, x, meta(1024), None, 1e-6)
    activate(meta(4, 2048), "silu", gated=True)
    yield "small kernels"


def published() -> Iterator[str]:
    """Every size, and without each feature for one of them."""
    yield from of_sizes(*SIZES)
    for features in (Features(folded=True), EVERYTHING._replace(early_weights=False)):
        chips.force(features)
        for rows in TILES:
            layer(SIZES["qwen3-8b"], rows)
            yield f"{features} of {rows}"
