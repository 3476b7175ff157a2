"""Linear layers with the norm before them and the activation or sum after them, on a GPU.

Only Triton has these kernels. Elsewhere, and for more rows, layers compute the parts one by one:
see `engine/layers/folded.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from engine.ops.gated import gelu_tanh_mul, silu_mul
from engine.ops.kernels import Kernels

# The gated activations that a linear layer can end with, by the op that computes them alone.
KINDS: dict[Callable[[torch.Tensor, Kernels], torch.Tensor], str] = {
    silu_mul: "silu",
    gelu_tanh_mul: "gelu_tanh",
}


class Stream(NamedTuple):
    """The residual stream of a decoder, with what folded layers leave for the next one."""

    x: torch.Tensor  # [T, hidden]
    squares: torch.Tensor  # [T, parts] fp32: the sums of squares of parts of each row
    counters: torch.Tensor  # [hidden] int32, all 0: of programs that share the inputs of an output


class RowNorm(NamedTuple):
    """An RMS norm of the rows of a stream; `offset` as in `rms_norm`."""

    weight: torch.Tensor  # [hidden]
    eps: float
    offset: bool


def max_folded_rows(device: torch.device) -> int:
    """Return the largest number of rows that folded layers take on a GPU; 0 if none are used."""
    from engine.kernels.triton.chips import features_of
    from engine.kernels.triton.folded_linear import MAX_ROWS

    return MAX_ROWS if features_of(device).folded else 0


def embed_stream(ids: torch.Tensor, table: torch.Tensor, scale: float) -> Stream:
    """Return table[ids] * scale, for ids [T] and a table [V, hidden], as a stream."""
    from engine.kernels.triton.embedding import gather_stream

    return Stream(*gather_stream(ids, table, scale))


def norm_linear(
    stream: Stream,
    norm: RowNorm,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str | None = None,
) -> torch.Tensor:
    """Return norm(x) W^T + b [T, out] of the stream's x; with `kind`, a value of KINDS, that of it.

    For a `kind`, the outputs are gates and up one after the other; the result is [T, out / 2].
    """
    from engine.kernels.triton.folded_linear import Norm, folded_linear

    before = Norm(norm.weight, norm.eps, norm.offset, stream.squares)
    return folded_linear(stream.x, weight, bias, stream.x.dtype, norm=before, kind=kind).out


def linear_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, stream: Stream
) -> Stream:
    """Return the stream plus x W^T + b, for x [T, in] and a weight [hidden, in]; rounded once."""
    from engine.kernels.triton.folded_linear import Residual, folded_linear

    residual = Residual(stream.x, stream.counters)
    total, squares = folded_linear(x, weight, bias, stream.x.dtype, residual=residual)
    assert squares is not None
    return Stream(total, squares, stream.counters)
